"""Recognise an expert's feed-forward network in the term of one output element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mokfx.passes.layer import Matrix, Network, Operand
from mokfx.passes.sums import open_sum
from mokfx.passes.terms import Size, Term, parts_of, substitute, uncast
from mokfx.passes.value import bind
from mokfx.passes.written_out import named_activations


class NotRecognised(Exception):
    """Why a term is not what was looked for.

    `depth` says how far recognition came, `blame` which ATen ops are worth pointing at.
    """

    def __init__(self, reason: str, depth: int = 0, blame: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.depth = depth
        self.blame = blame


@dataclass
class Scope:
    """What the indices of a network may be: its token, its expert, and who sees which tensor."""

    is_input: Callable[[Term], Operand | None]
    is_weight: Callable[[Term], Operand | None]
    expert: Term | None
    away: tuple[object, ...]
    input: Operand | None = None
    weight: Operand | None = None
    weight_on: str = ""
    casts: set[torch.dtype] | None = None

    def uncast(self, term: Term) -> Term:
        """A term without the casts around it, which are noted."""
        while term.op == "cast":
            if self.casts is not None:
                self.casts.add(term.args[1])
            term = term.args[0]
        return term

    def factors(self, term: Term) -> list[Term]:
        """The factors of a product, casts aside."""
        term = self.uncast(term)
        return [f for part in term.args for f in self.factors(part)] if term.op == "mul" else [term]

    def take_input(self, operand: Operand) -> None:
        if self.input is not None and (self.input.leaf, self.input.casts) != (operand.leaf, operand.casts):
            raise NotRecognised("its projections read different inputs", 3)
        self.input = operand

    def take_weight(self, operand: Operand, where: str) -> None:
        if self.weight is not None and (self.weight_on, self.weight) != (where, operand):
            raise NotRecognised("the router weight is applied more than once", 4)
        self.weight, self.weight_on = operand, where


def expanded(term: Term) -> Term:
    """An element of a computed tensor, as it was computed."""
    if term.op != "at" or term.args[1]:
        return term
    definition = getattr(term.args[0], "definition", None)
    if definition is None:
        return term
    mapping = {}
    for axis, where in zip(definition.axes, term.args[2:], strict=True):
        mapping.update(bind(axis, where))
    body: Term = substitute(definition.body, mapping)
    return body


def operand_of(term: Term, away: tuple[object, ...]) -> Operand | None:
    """The tensor and casts behind an element, if that is all it is."""
    casts: list[torch.dtype] = []
    while term.op == "cast":
        casts.insert(0, term.args[1])
        term = term.args[0]
    if term.op != "at" or term.args[1] != away:
        return None
    return Operand(term.args[0], term.args[2:], tuple(casts))


def network(term: Term, hidden: Term, scope: Scope) -> Network:
    """The network whose output element `hidden` is `term`."""
    product, bias = _with_bias(term, scope)
    inner_variable, inner = _opened(product)
    down, rest = _matrix_factor(inner, inner_variable, hidden, scope, product_casts=True)
    bias_matrix = None if bias is None else _vector(bias, hidden, scope)
    result = _activation(rest, inner_variable, scope)
    return replace(result, down=down, down_bias=bias_matrix)


def _with_bias(term: Term, scope: Scope) -> tuple[Term, Term | None]:
    """Split `sum + bias`."""
    term = scope.uncast(term)
    if term.op == "at":
        term = scope.uncast(expanded(term))
    if term.op != "add":
        return term, None
    parts = [scope.uncast(p) for p in term.args]
    parts = [scope.uncast(expanded(p)) if _is_product(expanded(p)) else p for p in parts]
    products = [p for p in parts if p.op == "sum"]
    others = [p for p in term.args if uncast(p).op == "at" and not _is_product(expanded(uncast(p)))]
    if len(products) != 1 or len(others) != 1 or len(parts) != 2:
        raise NotRecognised(f"`{describe(term)}` is not a product of a matrix with at most one bias", 2)
    return products[0], others[0]


def _is_product(term: Term) -> bool:
    return uncast(term).op == "sum"


def _opened(term: Term) -> tuple[Term, Term]:
    if term.op != "sum":
        raise NotRecognised(f"`{describe(term)}` stands where a matrix product was expected", 2)
    return open_sum(term)


def _matrix_factor(
    product: Term, inner: Term, outer: Term, scope: Scope, product_casts: bool = False
) -> tuple[Matrix, list[Term]]:
    """The factor that is an expert's matrix [inner, outer], and the other factors."""
    found: Matrix | None = None
    rest: list[Term] = []
    for factor in parts_of(product):
        operand = operand_of(factor, scope.away)
        if operand is not None and found is None and _reads(operand, inner) and _reads(operand, outer):
            found = Matrix(operand, _expert(operand, inner, outer, scope), inner, outer)
        else:
            rest.append(factor)
    if found is None:
        raise NotRecognised("a product has no weight matrix that belongs to the row's expert", 2)
    return found, rest


def _reads(operand: Operand, variable: Term) -> bool:
    if variable.op != "var":
        return True
    return any(variable in index.free for index in operand.index)


def _expert(operand: Operand, inner: Term | None, outer: Term, scope: Scope) -> Term | None:
    """The expert that an operand is read for: the scope's, or none where the rank holds one expert."""
    known = {v for v in (inner, outer) if v is not None}
    others = [i for i in operand.index if not (i.free & known) and i.op != "int"]
    mixed = [i for i in operand.index if (i.free & known) and i.free - known]
    if scope.expert is None:
        if others or mixed:
            raise NotRecognised("a weight is read at a position that is not its row's expert", 3)
        return None
    for index in mixed:
        parts = [(t, c) for t, c in index.args[1] if not t.free & known] if index.op == "lin" else []
        if parts and parts[0][0] is scope.expert:
            others.append(scope.expert)
    if others == [scope.expert]:
        return scope.expert
    if not others and not mixed:
        return None
    raise NotRecognised("a weight is read for another expert than its row's", 3)


def _vector(term: Term, outer: Term, scope: Scope) -> Matrix:
    operand = operand_of(term, scope.away)
    if operand is None or not _reads(operand, outer) or scope.is_input(term) is not None:
        raise NotRecognised(f"`{describe(term)}` is added where only an expert's bias may be", 3, ("aten.add",))
    return Matrix(operand, _expert(operand, None, outer, scope), None, outer)


@dataclass
class _Linear:
    matrix: Matrix
    bias: Matrix | None


def _linear(term: Term, outer: Term, scope: Scope) -> _Linear:
    """`x @ matrix + bias`, element `outer`."""
    product, bias = _with_bias(term, scope)
    inner, body = _opened(product)
    matrix, rest = _matrix_factor(body, inner, outer, scope)
    for factor in rest:
        operand = scope.is_input(factor) if _mentions(factor, inner) else None
        if operand is not None:
            scope.take_input(operand)
            continue
        weight = scope.is_weight(factor)
        if weight is None:
            raise NotRecognised(_foreign(factor), 3, PRODUCTS)
        scope.take_weight(weight, "input")
    return _Linear(matrix, None if bias is None else _vector(bias, outer, scope))


PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten._grouped_mm", "aten.mul")


def _foreign(factor: Term) -> str:
    """What a factor is that a projection should not have."""
    if operand_of(factor, ()) is not None:
        return f"an expert reads `{describe(factor)}` at another position than its row's token"
    if factor.depth > 0:
        return f"an expert has more than two projections: `{describe(factor)}` is projected again"
    return f"`{describe(factor)}` enters an expert beside its input"


def _mentions(term: Term, variable: Term) -> bool:
    return variable.op != "var" or variable in term.free


def _activation(rest: list[Term], inner: Term, scope: Scope) -> Network:
    """The activation between the projections, from the factors of the hidden element."""
    parts: list[Term] = []
    for factor in rest:
        weight = scope.is_weight(factor) if not _mentions(factor, inner) else None
        if weight is not None:
            scope.take_weight(weight, "hidden")
        else:
            parts.extend(scope.factors(factor))
    if len(parts) == 1 and parts[0].op == "at":
        opened = expanded(parts[0])
        if opened is not parts[0]:
            return _activation([opened], inner, scope)
    parts = [scope.uncast(expanded(p)) if _hides_factor(p) else p for p in parts]
    parts = named_activations([f for p in parts for f in scope.factors(p)])
    for form in (_clamped_swiglu, _limited_swiglu, _gated, _plain):
        found = form(parts, inner, scope)
        if found is not None:
            return found
    raise NotRecognised(
        f"the expert computes `{describe_product(parts)}` between its projections, which is none of the activations",
        3,
        tuple(f"aten.{p.op}" for p in parts),
    )


def _hides_factor(term: Term) -> bool:
    return term.op == "at" and expanded(term) is not term and not _is_product(expanded(term))


GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}


def _gated(parts: list[Term], inner: Term, scope: Scope) -> Network | None:
    """`act(gate) * up`; silu may be spelled as `gate * sigmoid(gate)`."""
    sigmoids = [p for p in parts if p.op == "sigmoid"]
    if len(parts) == 3 and len(sigmoids) == 1:
        gate = scope.uncast(sigmoids[0].args[0])
        others = [p for p in parts if p is not sigmoids[0]]
        ups = [p for p in others if p is not gate]
        if len(ups) != 1:
            return None
        return _two(gate, ups[0], "swiglu", inner, scope)
    gates = [p for p in parts if p.op in GATES]
    if len(parts) == 2 and len(gates) == 1:
        (up,) = [p for p in parts if p is not gates[0]]
        if up.op == "sigmoid":
            return None
        return _two(gates[0].args[0], up, GATES[gates[0].op], inner, scope)
    return None


def _two(
    gate: Term, up: Term, activation: str, inner: Term, scope: Scope, arguments: tuple[float, ...] = ()
) -> Network:
    first, second = _linear(gate, inner, scope), _linear(up, inner, scope)
    return Network(activation, arguments, first.matrix, second.matrix, first.matrix, first.bias, second.bias)


def _plain(parts: list[Term], inner: Term, scope: Scope) -> Network | None:
    """One projection and a pointwise function of it."""
    if len(parts) == 1 and parts[0].op in ("silu", "gelu", "gelu_tanh", "relu"):
        name, argument = parts[0].op, parts[0].args[0]
    elif len(parts) == 2 and parts[0] is parts[1] and parts[0].op == "relu":
        name, argument = "relu_squared", parts[0].args[0]
    elif len(parts) == 2 and any(p.op == "sigmoid" for p in parts):
        sigmoid = next(p for p in parts if p.op == "sigmoid")
        argument = next(p for p in parts if p is not sigmoid)
        if scope.uncast(sigmoid.args[0]) is not argument:
            return None
        name = "silu"
    else:
        return None
    up = _linear(argument, inner, scope)
    return Network(name, (), None, up.matrix, up.matrix, None, up.bias)


def _clamped_swiglu(parts: list[Term], inner: Term, scope: Scope) -> Network | None:
    """gpt-oss: `g * sigmoid(alpha * g) * (u + 1)` with `g <= limit` and `-limit <= u <= limit`."""
    gates = [p for p in parts if p.op == "clamp" and p.args[1] is None]
    sigmoids = [p for p in parts if p.op == "sigmoid"]
    ups = [p for p in parts if p.op == "add"]
    if not (len(parts) == 3 and len(gates) == len(sigmoids) == len(ups) == 1):
        return None
    scaled = scope.factors(sigmoids[0].args[0])
    alphas = [f.args[0] for f in scaled if f.op == "const"]
    inside = [f for f in scaled if f.op != "const"]
    up = [scope.uncast(t) for t in ups[0].args if t.op != "const"]
    ones = [t.args[0] for t in ups[0].args if t.op == "const"]
    if inside != [gates[0]] or len(up) != 1 or ones != [1.0] or up[0].op != "clamp":
        return None
    limit = gates[0].args[2]
    if up[0].args[1:] != (-limit, limit):
        return None
    alpha = alphas[0] if alphas else 1.0
    return _two(gates[0].args[0], up[0].args[0], "clamped_swiglu", inner, scope, (alpha, limit))


def _limited_swiglu(parts: list[Term], inner: Term, scope: Scope) -> Network | None:
    """DeepSeek-V4: `silu(g) * u` with `g <= limit` and `-limit <= u <= limit`; silu may be written out."""
    ups = [p for p in parts if p.op == "clamp" and p.args[1] is not None]
    gates = [scope.uncast(p.args[0]) for p in parts if p.op in ("silu", "sigmoid")]
    if len(ups) != 1 or len(gates) != 1 or gates[0].op != "clamp":
        return None
    written_out = [p for p in parts if p.op == "sigmoid"]
    if len(parts) != 2 + len(written_out) or (written_out and gates[0] not in parts):
        return None
    _, low, limit = gates[0].args
    if low is not None or limit is None or limit < 0 or ups[0].args[1:] != (-limit, limit):
        return None
    return _two(gates[0].args[0], ups[0].args[0], "limited_swiglu", inner, scope, (limit,))


# -- fused gate and up ---------------------------------------------------------------------------------------------


def fuse(found: Network, width: Size) -> Network:
    """Say how gate and up share one tensor, if they do."""
    if found.gate is None or found.up is None or found.gate.operand.leaf is not found.up.operand.leaf:
        return found
    gate, up = _columns(found.gate), _columns(found.up)
    if gate is None or up is None or gate[0] != up[0]:
        return found
    layouts = {(1, 0, width): "gate_up", (1, width, 0): "up_gate", (2, 0, 1): "interleaved"}
    layout = layouts.get((gate[0], gate[1], up[1]), "apart")
    biases = (found.gate_bias is None) == (found.up_bias is None)
    if layout != "apart" and biases and found.gate_bias is not None and found.up_bias is not None:
        first, second = _columns(found.gate_bias), _columns(found.up_bias)
        same = found.gate_bias.operand.leaf is found.up_bias.operand.leaf
        biases = same and (first, second) == (gate, up)
    return replace(found, layout=layout) if layout != "apart" and biases else found


def _columns(matrix: Matrix) -> tuple[Size, Size] | None:
    """`(stride, offset)` of the output dimension in its tensor."""
    for index in matrix.operand.index:
        if matrix.outputs in index.free:
            if index is matrix.outputs:
                return 1, 0
            if index.op == "lin" and len(index.args[1]) == 1:
                return index.args[1][0][1], index.args[0]
    return None


def extent(down: Matrix) -> Size:
    """An expert's intermediate size."""
    assert down.inputs is not None
    return down.inputs.args[1] if down.inputs.op == "var" else 1


def describe(term: Term) -> str:
    """A short name for a term in a reason."""
    term = uncast(term)
    if term.op == "at":
        return str(term.args[0])
    if term.op in ("mul", "add"):
        parts = sorted(term.args, key=lambda part: part.op != "const")  # a number is as old as its first use ever
        return (" * " if term.op == "mul" else " + ").join(map(describe, parts))
    if term.op == "sum":
        return "a matrix product"
    if term.op in ("const", "int"):
        return str(term.args[0])
    return f"{term.op}({', '.join(describe(a) if isinstance(a, Term) else str(a) for a in term.args)})"


def describe_product(parts: list[Term]) -> str:
    return " * ".join(describe(p) for p in sorted(parts, key=lambda part: part.op != "const"))
