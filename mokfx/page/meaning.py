"""The fact about a value in words: what its rows hold, and in which order they lie."""

from __future__ import annotations

from collections.abc import Iterable

from mokfx.passes.bijections import Exchange, Sort
from mokfx.passes.facts import Facts
from mokfx.passes.layer import Layer, Network
from mokfx.passes.terms import Term, children_of
from mokfx.passes.value import Leaf, Stack, Value

ACTIVATED = {
    "swiglu": "silu(gate) * up",
    "geglu": "gelu(gate) * up",
    "geglu_tanh": "gelu(gate) * up",
    "reglu": "relu(gate) * up",
    "clamped_swiglu": "clamped swiglu of gate and up",
}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")


class Words:
    """Says what facts mean, in the words of one layer; of an unrecognised one, by the names in the graph."""

    def __init__(self, layers: Iterable[Layer], facts: Facts) -> None:
        self.facts = facts
        self._roles: dict[int, str] = {}
        self._of: dict[Term, frozenset[str]] = {}
        self._reads: dict[Term, Term | None] = {}
        self.layer: Layer | None = None
        for layer in layers:
            self.layer = layer
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

    def role(self, leaf: Leaf | Stack) -> str:
        first = leaf.leaves[0] if isinstance(leaf, Stack) else leaf
        role = self._roles.get(id(first.tensor))
        if role is None and isinstance(first.bound, int) and not first.tensor.is_floating_point():
            return "ids"
        return role or ""

    # -- what a fact says ------------------------------------------------------------------------------------------

    def of(self, value: Value, floating: bool) -> str:
        """What a tensor means; "" if it has nothing to do with routing."""
        return self._rows(value) if floating else self.of_index(value.body)

    def of_index(self, term: Term) -> str:
        """What an integer, or a tensor of integers, means."""
        term = _bare(term)
        if term.op == "at" and self.role(term.args[0]) == "ids":
            return "the expert of each slot"
        if term.op == "div" and _bijections(term):
            return "the token of each row" + _order(self.facts, term.args[0])
        if term.op == "mod" and isinstance(term.args[0], Term) and term.args[0].op == "perm":
            return "which choice each row is" + _order(self.facts, term.args[0])
        if term.op == "perm":
            return _positions(term, self.facts)
        if term.op == "seg":
            return "the expert of each row, in expert order"
        if term.op == "mod" and term.args[0].op == "seg":
            return "which of this rank's experts each received row is for"
        if term.op in ("delta", "lt") and "ids" in self.roles(term):
            return "1 where a slot chose the expert, else 0"
        return _counts(term)

    def roles(self, term: Term) -> frozenset[str]:
        """Which of the layer's tensors a term reads."""
        known = self._of.get(term)
        if known is None:
            own = {self.role(term.args[0])} - {""} if term.op == "at" else set()
            known = self._of[term] = frozenset(own).union(*(self.roles(child) for child in children_of(term)))
        return known

    def _rows(self, value: Value) -> str:
        body = _bare(value.body)
        what = self._what(body)
        if what == "the expert of each slot":
            return what
        if not what:
            leaf = body.args[0] if body.op == "at" else None
            plain = isinstance(leaf, Leaf) and not body.routed and not body.looked_up
            return "" if plain or body.op in ("const", "size") else self.of_index(body)
        if body.op == "at" and what.endswith("matrix"):
            return what
        read = self._read(body)
        order = _order_of_rows(read, value, self.facts) if read is not None else ""
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
                return f"rows of `{leaf}`" if body.routed and role == "" else f"the {role} matrix" if role else ""
            return "rows of x" if role == "x" and (body.routed or body.looked_up) else known[role]
        if "down" in has:
            return "expert outputs times the router weight" if "weights" in has else "expert outputs"
        if "gate" in has or "up" in has:
            return self._hidden(body, has)
        if "x" in has:
            return "rows of x times the router weight" if "weights" in has else "rows of x"
        if "weights" in has:
            return "router weights"
        return "" if not body.routed or body.depth == 0 else "computed from routed rows"

    def _hidden(self, body: Term, has: frozenset[str]) -> str:
        network = None if self.layer is None else self.layer.network
        fused = network is not None and network.layout != "apart"
        weighted = " times the router weight" if "weights" in has else ""
        if body.op == "mul" and any(factor.op == "const" for factor in body.args):
            return "scaled"
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
            found = [term] if term.op == "at" else []
            found += [read for child in children_of(term) if (read := self._read(child)) is not None]
            by_role = {self.role(read.args[0]): read for read in reversed(found)}
            routed = next((read for read in found if read.routed), None)
            self._reads[term] = by_role.get("x") or by_role.get("weights") or routed or next(iter(found), None)
        return self._reads[term]


def _bare(term: Term) -> Term:
    while term.op in ("cast", "detached"):
        term = term.args[0]
    return _bare(term.args[1]) if term.op == "valid" and isinstance(term.args[1], Term) else term


# -- the order of rows -------------------------------------------------------------------------------------------------


def _order_of_rows(read: Term, value: Value, facts: Facts) -> str:
    """In which order the rows lie, told by where a row's token is read."""
    rows = [variable for axis in value.axes[:-1] for variable in axis]
    leaf = read.args[0].leaves[0] if isinstance(read.args[0], Stack) else read.args[0]
    index = read.args[2 : 2 + max(leaf.tensor.dim() - 1, 1)]
    perms = [perm for term in index for perm in _bijections(term)]
    if perms:
        return _order(facts, *index).removeprefix(", ")
    if any(term.inner for term in index):
        return "in the places that routing gives them"
    if any(term.op == "div" for term in index):
        return "slot by slot"
    by_token = {v for term in index for v in term.free}
    return "a row for each token and choice" if set(rows) - by_token and len(rows) > len(by_token) else "token by token"


def _bijections(term: Term) -> list[Term]:
    """The permutations that an index goes through, the last one first."""
    found: list[Term] = []
    todo = [term]
    while todo:
        node = todo.pop(0)
        if node.op == "perm":
            found.append(node)
        if node.op in ("perm", "div", "mod", "lin"):
            todo.extend(children_of(node))
    return found


def _order(facts: Facts, *index: Term) -> str:
    """", in expert order", or the like."""
    perms = [perm for term in index for perm in _bijections(term)]
    if not perms:
        return ""
    names = [(type(perm.args[0]), bool(perm.args[1])) for perm in perms]
    last = perms[-1]  # the one that the row's own number goes through
    expert = _expert_of(last, facts)
    received = any(kind is Exchange and not inverse for kind, inverse in names)
    if isinstance(last.args[0], Sort) and not last.args[1]:
        if expert is not None:
            return f", for {'local ' if received else ''}expert {expert}"
        return ", received, by local expert" if received else ", in expert order"
    if received:
        return ", as received from the ranks"
    return ", slot by slot" if last.args[1] else ""


def _expert_of(perm: Term, facts: Facts) -> str | None:
    """The expert whose part of the sorted rows this is; None of all rows."""
    position = perm.args[2]
    if position.op == "var":
        number = facts.size_term(position.args[1])
        return str(number.args[1]) if number.op == "count" and number.args[1].op == "int" else None
    if position.op == "lin":
        before = [term for term, _ in position.args[1] if term.op == "count"]
        return str(len(before)) if before else None
    return None


def _is_received(bijection: object) -> bool:
    return isinstance(bijection, Sort) and any(isinstance(perm, Exchange) for perm in bijection.body.perms)


def _positions(perm: Term, facts: Facts) -> str:
    bijection, inverse, _ = perm.args
    if isinstance(bijection, Exchange):
        return "the sender's row of each received row"
    if _is_received(bijection):
        return "where each received row went" if inverse else "the received row at each place, by local expert"
    if inverse:
        return "each slot's place in expert order"
    return "the slot at each place" + (_order(facts, perm) or ", in expert order")


# -- numbers of rows ---------------------------------------------------------------------------------------------------


def _counts(term: Term) -> str:
    if term.op == "count":
        keys, key = term.args
        away = any(isinstance(perm, Exchange) for perm in keys.body.perms)
        what = "received rows of" if away else "slots of"
        if _swapped(key):
            return "rows that each rank sends to this rank's experts"
        if key.op == "int":
            return f"{what} {'local ' if away else ''}expert {key}"
        return f"{what} each {'local ' if away else ''}expert"
    if term.op == "start":
        return "where the rows of each expert begin"
    if term.op == "running":
        return "how many slots up to this one chose the same expert"
    if term.op == "sum":
        inner = _counts(term.args[1])
        sums = {"slots of each expert": "rows for each rank"}
        return sums.get(inner, "rows from each rank" if "sends" in inner else "")
    parts = [part for part, _ in term.args[1]] if term.op == "lin" else list(term.args) if term.op == "add" else []
    if parts and all(isinstance(part, Term) and part.op == "count" for part in parts):
        if any(_swapped(part.args[1]) for part in parts):
            return "rows from one rank"
        whole = len({part.args[0] for part in parts}) == 1
        return "a number of rows" if whole else ""
    return ""


def _swapped(term: Term) -> bool:
    return term.op == "swap" or any(_swapped(child) for child in children_of(term))
