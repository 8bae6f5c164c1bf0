"""The fact about a value in words: what its rows hold, and in which order they lie."""

from __future__ import annotations

from collections.abc import Iterable

from mokfx.page.indices import IndexWords, bare, bijections, order_of
from mokfx.passes.abroad import Abroad
from mokfx.passes.facts import Facts, shape_of
from mokfx.passes.layer import Layer, Network
from mokfx.passes.terms import Size, Term, children_of, factors_of, product, terms_of
from mokfx.passes.value import Leaf, Stack, Value, sizes
from mokfx.readable import short_name

ACTIVATED = {
    "swiglu": "silu(gate) * up",
    "geglu": "gelu(gate) * up",
    "geglu_tanh": "gelu(gate) * up",
    "reglu": "relu(gate) * up",
    "clamped_swiglu": "clamped swiglu of gate and up",
    "limited_swiglu": "silu(gate) * up, both clamped",
}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")


class Words:
    """Says what facts mean, in the words of one layer; of an unrecognised one, by the names in the graph."""

    def __init__(self, layers: Iterable[Layer], facts: Facts) -> None:
        self.facts = facts
        self.index = IndexWords(facts, lambda term: term.op == "at" and self.role(term.args[0]) == "ids")
        self._roles: dict[int, str] = {}
        self._of: dict[Term, frozenset[str]] = {}
        self._reads: dict[Term, Term | None] = {}
        self.layer: Layer | None = None
        self.tokens: Size | None = None
        for layer in layers:
            self.layer = layer
            self.tokens = product(shape_of(layer.x.leaves[0].tensor)[:-1])
            self._name(layer)

    def _name(self, layer: Layer) -> None:
        networks: list[tuple[Network | None, str]] = [(layer.network, ""), (layer.shared, "shared ")]
        for network, prefix in networks:
            if network is not None:
                for name in ("down", "up", "gate"):
                    matrix = getattr(network, name)
                    for leaf in () if matrix is None else matrix.operand.leaves:
                        self._roles[id(leaf.tensor)] = prefix + name
        for operand, role in ((layer.weights, "weights"), (layer.ids, "ids"), (layer.x, "x")):
            for leaf in () if operand is None else operand.leaves:
                self._roles[id(leaf.tensor)] = role

    def role(self, leaf: Leaf | Stack | Abroad) -> str:
        if isinstance(leaf, Abroad):
            return ""  # a number on another rank
        first = leaf.leaves[0] if isinstance(leaf, Stack) else leaf
        role = self._roles.get(id(first.tensor))
        if self.layer is None and isinstance(first.bound, int) and not first.tensor.is_floating_point():
            return "ids"
        return role or ""

    # -- what a fact says ------------------------------------------------------------------------------------------

    def of(self, value: Value, floating: bool) -> str:
        """What a tensor means; "" if it has nothing to do with routing."""
        body = bare(value.body)
        if body.op == "at" and isinstance(body.args[0], Abroad):
            there = self._what(bare(body.args[0].body)) if floating else self.of_index(body.args[0].body)
            return f"{there}, as received from the ranks" if there else ""
        return self._rows(value) if floating else self.of_index(value.body)

    def of_index(self, term: Term) -> str:
        """What an integer, or a tensor of integers, means."""
        return self.index.of(term)

    def roles(self, term: Term) -> frozenset[str]:
        """Which of the layer's tensors a term reads."""
        known = self._of.get(term)
        if known is None:
            leaf = term.args[0] if term.op == "at" else None
            own = set() if leaf is None else self.roles(leaf.body) if isinstance(leaf, Abroad) else {self.role(leaf)}
            known = self._of[term] = frozenset(own - {""}).union(*(self.roles(child) for child in children_of(term)))
        return known

    def _rows(self, value: Value) -> str:
        body = bare(value.body)
        what = self._what(body)
        if what in ("the expert of each slot", "router weight at each slot's expert and place"):
            return what
        if not what:
            leaf = body.args[0] if body.op == "at" else None
            plain = isinstance(leaf, Leaf) and not body.routed and not body.looked_up
            return "" if plain or body.op == "size" else self.of_index(body)
        if body.op == "at" and what.endswith("matrix"):
            return what
        rows = product(size for axis in value.axes[:-1] for size in sizes(axis))
        summed = self.layer is not None and rows == self.tokens != rows * self.layer.top_k
        if what.startswith("expert outputs") and summed:
            return "each token's expert outputs, weighted and summed"
        read = self._read(body)
        tokens = None if self.layer is None else rows == self.tokens
        order = "" if read is None else _order_of_rows(read, value, self.facts, tokens)
        return f"{what}, {order}" if order else what

    def _what(self, body: Term) -> str:
        has = self.roles(body)
        if body.op == "at":
            leaf = body.args[0]
            if getattr(leaf, "layer", None) is not None:
                return "the MoE of x"
            role = self.role(leaf)
            known = {"x": "the tokens", "ids": "the expert of each slot", "weights": "router weights"}
            if role not in known:
                return f"the {role} matrix" if role else f"rows of `{short_name(str(leaf))}`" if body.routed else ""
            return "rows of x" if role == "x" and (body.routed or body.looked_up) else known[role]
        if "down" in has:
            return "expert outputs times the router weight" if "weights" in has else "expert outputs"
        if "gate" in has or "up" in has:
            return self._hidden(body, has)
        if "x" in has:
            return "rows of x times the router weight" if "weights" in has else "rows of x"
        if "weights" in has:
            factors = {factor.op for part in terms_of(body) for factor in factors_of(part)}
            if "nonzero" in factors:
                return ""  # where there is a weight, not what it is
            masked = not factors.isdisjoint(("delta", "lt"))
            return "router weight at each slot's expert and place" if masked else "router weights"
        return "" if not body.routed or body.depth == 0 else "computed from routed rows"

    def _hidden(self, body: Term, has: frozenset[str]) -> str:
        network = None if self.layer is None else self.layer.network
        fused = network is not None and network.layout != "apart"
        weighted = " times the router weight" if "weights" in has else ""
        if body.op in ("mul", "add") and any(part.op == "const" for part in body.args):
            return "scaled" if body.op == "mul" else "shifted by a constant"
        clamped = network is not None and network.activation == "clamped_swiglu" and body.op == "mul"
        if clamped and not any(factor.op == "add" for factor in body.args):
            return "gate * sigmoid of it"
        if body.op in ("sum", "add"):
            name = "gate and up projections" if fused else "gate projection" if "gate" in has else "up projection"
            return name + (" plus bias" if body.op == "add" else "") + weighted
        if network is not None and (body.op == "mul" or {"gate", "up"} <= has):
            return f"hidden: {ACTIVATED.get(network.activation, network.activation)}{weighted}"
        half = "gate or up" if fused and body.op not in ACTIVATIONS else "gate" if "gate" in has else "up"
        return f"{body.op} of the {half} projection{weighted}"

    def _read(self, term: Term) -> Term | None:
        """Where a term reads x or, if it does not, the router weights or any routed tensor."""
        if term not in self._reads:
            found = [term] if term.op == "at" and not isinstance(term.args[0], Abroad) else []
            found += [read for child in children_of(term) if (read := self._read(child)) is not None]
            by_role = {self.role(read.args[0]): read for read in reversed(found)}
            routed = next((read for read in found if read.perms), None)
            self._reads[term] = by_role.get("x") or by_role.get("weights") or routed or next(iter(found), None)
        return self._reads[term]


# -- the order of rows -------------------------------------------------------------------------------------------------


def _order_of_rows(read: Term, value: Value, facts: Facts, by_token: bool | None) -> str:
    """In which order the rows lie, told by where a row's token is read."""
    leaf = read.args[0].leaves[0] if isinstance(read.args[0], Stack) else read.args[0]
    index = read.args[2 : 2 + max(leaf.tensor.dim() - 1, 1)]
    if any(bijections(term) for term in index):
        return order_of(facts, *index).removeprefix(", ")
    if any(term.inner for term in index):
        return "in the places that routing gives them"
    if by_token is not False:
        return "token by token" if by_token else ""
    return "a row for each token and choice" if len(value.axes) > 2 else "slot by slot"
