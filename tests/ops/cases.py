"""Calls of the op to test with: every layout of the same weights, built from named settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mokfx.ops.activations import ACTIVATIONS


@dataclass(frozen=True)
class Case:
    """What a test varies; `build` makes the tensors."""

    tokens: int = 11
    choices: int = 2
    experts: int = 4
    hidden: int = 8
    inner: int = 6
    activation: str = "swiglu"
    gate_up: str = "apart"
    listed: bool = False
    """A matrix for each expert, in place of one stacked tensor."""
    transposed: bool = False
    """Stored [out, in], passed as a transposed view, as the weight of an nn.Linear is."""
    biases: bool = False
    shared: str = ""
    """"" or "apart" or "fused", with "+sigmoid" for the gate."""
    shared_inner: int | None = None
    """None: a little wider than the others."""
    dropped: float = 0.0
    """Fraction of slots with id -1."""
    weight_on: str = "output"
    capacity: int | None = None
    capacity_order: str = "choice"
    dtype: torch.dtype = torch.float64
    ids_dtype: torch.dtype = torch.int64
    weights_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    only: tuple[int, ...] = ()
    """Route to these experts alone; () for all."""

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(Case(), k)]
        return ",".join(changed) or "default"


ARGUMENTS = {"clamped_swiglu": [1.702, 0.7], "limited_swiglu": [0.7]}


@dataclass
class Inputs:
    """Positional tensors, and keywords, of one call."""

    args: list[Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        """The tensors that get gradients, in the order of `mok::moe_backward`."""
        x, _, weights, *layers = self.args
        flat = [x, weights, *(t for layer in layers for t in layer)]
        for name in ("b_gate", "b_up", "b_down"):
            flat += self.settings.get(name) or []
        for name in ("shared_w_gate", "shared_w_up", "shared_w_down", "shared_sigmoid"):
            flat += [self.settings[name]] if self.settings.get(name) is not None else []
        return flat

    def map(self, change: Any) -> Inputs:
        """The same call with every tensor changed."""

        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, list) and value and isinstance(value[0], Tensor):
                return [change(v) for v in value]
            return value

        return Inputs([apply(a) for a in self.args], {k: apply(v) for k, v in self.settings.items()})

    def require_grad(self) -> Inputs:
        """The same values as new leaves that require gradients."""
        return self.map(lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)


def build(case: Case, seed: int = 0) -> Inputs:
    """Random tensors for `case`. Cases that differ in layout alone hold the same values for the same seed."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random, dtype=torch.float64) * scale).to(case.dtype)

    gated = ACTIVATIONS[case.activation].gated
    e, h, i = case.experts, case.hidden, case.inner
    x = normal(case.tokens, h)
    gate, up, down = (
        normal(e, h, i, scale=h**-0.5),
        normal(e, h, i, scale=h**-0.5),
        normal(e, i, h, scale=i**-0.5),
    )
    b_gate, b_up, b_down = normal(e, i), normal(e, i), normal(e, h)
    scores = torch.rand(case.tokens, e, generator=random)
    if case.only:
        scores[:, list(case.only)] += 1
    ids = scores.topk(case.choices).indices
    ids[torch.rand(ids.shape, generator=random) < case.dropped] = -1
    weights = torch.rand(ids.shape, generator=random, dtype=torch.float64) + 0.1

    def stored(weight: Tensor) -> Tensor:
        return weight.transpose(-1, -2).contiguous().transpose(-1, -2) if case.transposed else weight

    def store(layer: Tensor | None) -> list[Tensor]:
        if layer is None:
            return []
        if layer.dim() == 3:
            layer = stored(layer)
        return [t.clone() for t in layer] if case.listed else [layer]

    settings: dict[str, Any] = {
        "num_experts": e,
        "activation": case.activation,
        "activation_args": list(ARGUMENTS.get(case.activation, ())),
        "gate_up": case.gate_up,
        "weight_on": case.weight_on,
        "capacity": case.capacity,
        "capacity_order": case.capacity_order,
        "out_dtype": case.out_dtype,
    }
    first = _fuse(gate, up, case.gate_up) if gated else (None, up)
    if case.biases:
        first_bias = _fuse(b_gate, b_up, case.gate_up) if gated else (None, b_up)
        settings |= {"b_gate": store(first_bias[0]), "b_up": store(first_bias[1]), "b_down": store(b_down)}
    if case.shared:
        s = case.shared_inner or i + 3
        parts = [normal(h, s, scale=h**-0.5), normal(h, s, scale=h**-0.5)]
        settings["shared_w_down"] = stored(normal(s, h, scale=s**-0.5))
        if "fused" in case.shared:
            settings["shared_w_gate"] = stored(torch.cat(parts, dim=1))
        else:
            settings["shared_w_gate"], settings["shared_w_up"] = map(stored, parts)
        if "sigmoid" in case.shared:
            settings["shared_sigmoid"] = normal(h, 1)
    args = [
        x,
        ids.to(case.ids_dtype),
        weights.to(case.weights_dtype or case.dtype),
        store(first[0]),
        store(first[1]),
        store(down),
    ]
    return Inputs(args, settings)


def _fuse(gate: Tensor, up: Tensor, layout: str) -> tuple[Tensor, Tensor | None]:
    if layout == "apart":
        return gate, up
    if layout == "interleaved":
        return torch.stack((gate, up), dim=-1).flatten(-2), None
    return torch.cat((gate, up) if layout == "gate_up" else (up, gate), dim=-1), None


CASES = [
    *(Case(activation=name, transposed=True) for name in ACTIVATIONS),
    *(Case(activation=name, biases=True, weight_on="hidden") for name in ACTIVATIONS),
    *(
        Case(gate_up=layout, listed=listed, transposed=transposed, biases=True, activation="clamped_swiglu")
        for layout in ("apart", "gate_up", "up_gate", "interleaved")
        for listed in (False, True)
        for transposed in (False, True)
    ),
    *(Case(weight_on=on, biases=True, dropped=0.3) for on in ("output", "hidden", "input")),
    *(Case(shared=kind, dropped=0.2) for kind in ("apart", "fused", "apart+sigmoid", "fused+sigmoid")),
    *(
        Case(capacity=capacity, capacity_order=order, weight_on=on, choices=3)
        for order in ("choice", "token")
        for capacity, on in ((0, "output"), (1, "hidden"), (3, "output"), (4, "input"), (100, "output"))
    ),
    Case(capacity=3, dropped=0.3, biases=True, shared="apart"),
    Case(tokens=0, shared="apart+sigmoid", biases=True),
    Case(tokens=1, choices=1),
    Case(only=(2,), choices=1, biases=True),
    Case(only=(0, 3), listed=True, biases=True),
    Case(dropped=1.0, shared="fused"),
    Case(choices=4, ids_dtype=torch.int32),
    Case(experts=1, choices=1, listed=True),
    Case(tokens=70, hidden=33, inner=17, shared="apart+sigmoid"),
]
"""Between them: every activation, layout, place of the weight, and way to lose a slot."""


def with_dtype(case: Case, dtype: torch.dtype) -> Case:
    """`case` in another dtype."""
    return replace(case, dtype=dtype)
