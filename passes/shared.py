"""What joins a layer that was recognised before: a shared expert, or the weight of its only choice."""

from __future__ import annotations

from dataclasses import replace

from mokfx.passes.facts import shape_of
from mokfx.passes.layer import Layer, Matrix, Operand
from mokfx.passes.network import NotRecognised, Scope, expanded, extent, fuse, network, operand_of
from mokfx.passes.sums import open_sum
from mokfx.passes.terms import Term, add, integer, parts_of, product, radix, terms_of, uncast
from mokfx.passes.value import Leaf, Value, position, size_of, sizes


def with_shared(value: Value) -> Layer | None:
    """An MoE layer's output plus a network of the same tokens."""
    terms = terms_of(value.body)
    layers = [t for t in terms if layer_of(t) is not None]
    if len(terms) != 2 or len(layers) != 1:
        return None
    layer = layer_of(layers[0])
    (other,) = [t for t in terms if t is not layers[0]]
    if layer is None or not _is_there(layers[0], value):
        return None
    return joined(value, layer, other)


def weighted(value: Value) -> Layer | None:
    """A layer of one choice without a weight, times a tensor with one number for each token: its weight."""
    parts = parts_of(value.body)
    layers = [p for p in parts if layer_of(p) is not None]
    if len(parts) != 2 or len(layers) != 1:
        return None
    layer = layer_of(layers[0])
    (other,) = [p for p in parts if p is not layers[0]]
    weight = operand_of(other, ())
    if layer is None or layer.weights is not None or layer.shared is not None or layer.top_k != 1:
        return None
    if weight is None or not isinstance(weight.leaf, Leaf) or not _is_there(layers[0], value):
        return None
    shape = shape_of(weight.leaf.tensor)
    tokens = [v for axis in value.axes[:-1] for v in axis]
    token = radix(tokens, sizes(tokens))
    if product(shape) != product(sizes(tokens)) or radix(weight.index, shape) is not token:
        return None
    return replace(layer, weights=weight)


def _is_there(term: Term, value: Value) -> bool:
    """Whether an element of a layer's output is the one of this token and this column."""
    leaf, _, *rows, column = uncast(term).args
    *shape, width = shape_of(leaf.tensor)
    tokens = [v for axis in value.axes[:-1] for v in axis]
    layer = layer_of(term)
    assert layer is not None
    number = product(shape_of(layer.x.leaves[0].tensor)[:-1]) if len(shape) == 1 else product(shape)
    same = number == product(sizes(tokens)) and width == size_of(value.axes[-1])
    return same and radix(rows, shape) is radix(tokens, sizes(tokens)) and column is position(value.axes[-1])


def accumulated(value: Value) -> tuple[Value, Term] | None:
    """The sum without a computed tensor that rows are added into, and that tensor: a shared expert's output, maybe."""
    terms = terms_of(value.body)
    given = [t for t in terms if not t.routed and expanded(uncast(t)) is not uncast(t)]
    if len(given) != 1 or len(terms) == 1:
        return None
    return value.with_body(add(t for t in terms if t is not given[0])), given[0]


def joined(value: Value, layer: Layer, term: Term) -> Layer | None:
    """The layer with `term` as its shared expert, if that is one."""
    if layer.shared is not None:
        return None
    try:
        return _Shared(value, layer).extend(term)
    except NotRecognised:
        return None


def layer_of(term: Term) -> Layer | None:
    term = uncast(term)
    layer = getattr(term.args[0], "layer", None) if term.op == "at" else None
    return layer if isinstance(layer, Layer) else None


class _Shared:
    def __init__(self, value: Value, layer: Layer) -> None:
        *tokens, hidden = value.axes
        self.token = radix([v for a in tokens for v in a], [s for a in tokens for s in sizes(a)])
        self.hidden = position(hidden)
        self.layer = layer

    def extend(self, term: Term) -> Layer:
        parts = [uncast(part) for part in parts_of(expanded(uncast(term)))]
        gate: Matrix | None = None
        if len(parts) == 2:
            sigmoids = [p for p in map(_open, parts) if p.op == "sigmoid"]
            if len(sigmoids) != 1:
                raise NotRecognised("not a shared expert")
            gate = self.sigmoid_gate(sigmoids[0].args[0])
            parts = [p for p in parts if _open(p).op != "sigmoid"]
        if len(parts) != 1:
            raise NotRecognised("not a shared expert")
        scope = Scope(self.input_operand, lambda term: None, None, (), casts=set())
        found = network(parts[0], self.hidden, scope)
        if found.activation != "swiglu" or any((found.gate_bias, found.up_bias, found.down_bias)):
            raise NotRecognised("not a shared expert")
        return self.layer.with_shared(fuse(found, extent(found.down)), gate)

    def sigmoid_gate(self, term: Term) -> Matrix:
        product = _open(term)
        if product.op != "sum":
            raise NotRecognised("not a shared expert")
        inner, body = open_sum(product)
        given = parts_of(body)
        operands = [operand_of(factor, ()) for factor in given if self.input_operand(factor) is None]
        operand = operands[0] if len(given) == 2 and len(operands) == 1 else None
        if operand is None:
            raise NotRecognised("not a shared expert")
        if [i for i in operand.index if i.op != "int"] != [inner]:
            raise NotRecognised("not a shared expert")  # it must have one column
        return Matrix(operand, None, inner, integer(0))

    def input_operand(self, term: Term) -> Operand | None:
        operand = operand_of(term, ())
        x = self.layer.x
        if operand is None or operand.casts != x.casts or not isinstance(operand.leaf, Leaf):
            return None
        same = operand.leaf is x.leaf or _same_data(operand.leaf, x.leaves[0])
        *tokens, last = operand.index
        where = radix(tokens, shape_of(operand.leaf.tensor)[:-1])
        return operand if same and where is self.token and last.op in ("var", "int") else None


def _open(term: Term) -> Term:
    return uncast(expanded(uncast(term)))


def _same_data(a: Leaf, b: Leaf) -> bool:
    return a.tensor is b.tensor and a.version == b.version
