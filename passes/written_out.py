"""Activations that a program writes out, as the named function that they are."""

from __future__ import annotations

import math

from mokfx.passes.terms import Term, apply, const, mul

ROOT_HALF = math.sqrt(0.5)


def named_activations(parts: list[Term]) -> list[Term]:
    """The factors of a hidden element, with `1/2 h (1 + erf(h / sqrt 2))` as the one factor `gelu(h)`."""
    for part in parts:
        erfs = [term for term in part.args if term.op == "erf"] if part.op == "add" else []
        if len(erfs) != 1 or set(part.args) != {const(1), erfs[0]}:
            continue
        for hidden in parts:
            if const(0.5) in parts and _is_scaled(erfs[0].args[0], hidden):
                rest = list(parts)
                for factor in (part, hidden, const(0.5)):
                    rest.remove(factor)  # once each: h gelu(h) has another h
                return [apply("gelu", hidden), *rest]
    return parts


def _is_scaled(term: Term, hidden: Term) -> bool:
    """Whether a term is `hidden / sqrt 2`, in all digits: with fewer it is another function in float64."""
    scale = [factor.args[0] for factor in term.args if factor.op == "const"] if term.op == "mul" else []
    return len(scale) == 1 and abs(scale[0] - ROOT_HALF) < 1e-12 and term is mul([const(scale[0]), hidden])
