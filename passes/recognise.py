"""Recognise the MoE of x: a sum over a token's choices of its router weight times its expert's network.

By the time a tensor is back at its tokens, every permutation and exchange in its term has met its inverse. What is
left is compared with the definition: each index must be this token, this choice, or the expert of this choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mokfx.passes.abroad import is_equal
from mokfx.passes.bijections import Exchange, Sort
from mokfx.passes.facts import shape_of
from mokfx.passes.generalise import generalise
from mokfx.passes.indicators import is_kept, place_of
from mokfx.passes.layer import Capacity, Layer, Network, Operand
from mokfx.passes.network import NotRecognised, Scope, describe, expanded, extent, fuse, network, operand_of
from mokfx.passes.pieces import atoms, first_choice, pieces_of
from mokfx.passes.shared import accumulated, joined, layer_of, weighted, with_shared
from mokfx.passes.terms import (
    Size,
    Term,
    add,
    at,
    bound,
    div,
    integer,
    lin,
    mod,
    parts_of,
    product,
    radix,
    substitute,
    subterms,
    terms_of,
    uncast,
    var,
)
from mokfx.passes.value import Leaf, Stack, Value, position, size_of, sizes


@dataclass
class Refusal:
    """A sum over experts or choices that is not the MoE of anything, and why."""

    reason: str
    depth: int
    blame: tuple[str, ...] = ()
    """ATen ops: the last one before the sum is where the reason points."""


def recognise(value: Value) -> Layer | Refusal | None:
    """The layer whose output a fact describes; why it is none; or None for a tensor that is nothing of the kind."""
    body = value.body
    if body.op == "at" and not body.routed and layer_of(body) is None:
        body = expanded(body)  # a composite op may reach its result by views of what it computed
        value = value.with_body(body)
    if len(value.axes) < 2 or body.op not in ("sum", "add", "mul", "cast", "detached", "valid"):
        return None
    if not (body.routed or body.looked_up):
        return with_shared(value) or weighted(value)
    if not _candidate(uncast(body)):
        return None
    added = accumulated(value)
    routed = None if added is None else recognise(added[0])
    if added is not None and isinstance(routed, Layer):
        whole = joined(value, routed, added[1])
        if whole is not None:
            return whole
    try:
        return _Recognition(value).layer()
    except NotRecognised as why:
        drawn = next((leaf for leaf in map(_drawn, subterms(body)) if leaf is not None), None)
        if drawn is not None:
            return Refusal("an expert drops values at random, which the op does not do", why.depth, RANDOM)
        return Refusal(why.reason, why.depth, why.blame)


RANDOM = ("aten.bernoulli", "aten.native_dropout")


def _drawn(term: Term) -> Leaf | None:
    """The random mask, maybe rescaled, that a term is an element of."""
    leaf = term.args[0] if term.op == "at" else None
    if isinstance(leaf, Leaf) and leaf.definition is not None:
        scaled = [f for f in parts_of(leaf.definition.body) if f.op != "const"]
        leaf = scaled[0].args[0] if len(scaled) == 1 and scaled[0].op == "at" else None
    return leaf if isinstance(leaf, Leaf) and leaf.made_by in RANDOM else None


def _candidate(body: Term) -> bool:
    """Whether a term is worth the comparison: two projections deep, not one step of computing them."""
    return body.depth >= 2


class _Recognition:
    """One comparison of a fact with the definition of an MoE layer."""

    def __init__(self, value: Value) -> None:
        self.value = value
        self.choice = integer(0)
        self.ids: Operand | None = None
        self.visited: set[int] = set()
        """How many experts a loop visits whose ids do not tell how many there are: some of them are no layer."""
        *self.token_axes, hidden = value.axes
        self.token = radix([v for a in self.token_axes for v in a], [s for a in self.token_axes for s in sizes(a)])
        self.hidden = position(hidden)
        self.hidden_size = size_of(hidden)
        if len(hidden) > 1:
            raise NotRecognised("the last dimension of the output is not the hidden dimension of the experts", 0)

    def layer(self) -> Layer:
        choice, summand, complete = self.over_choices()
        self.choice = choice
        parts = parts_of(summand)
        limits = {p for p in parts if p.op == "lt"}
        parts = [p for p in parts if p not in limits]
        kept = {p: key for p in limits if (key := is_kept(p)) is not None}
        limits -= kept.keys()
        _no_leftover(parts)
        scale, parts = _constants(parts)
        weights, outputs = self.split_weights(parts)
        if len(outputs) != 1:
            names = " * ".join(f"`{describe(p)}`" for p in outputs) or "nothing"
            raise NotRecognised(f"a token's output is {names}, not one expert's output times its router weight", 2)
        keys = set[Term]().union(*map(self.expert_keys, parts))
        exchange, away = _exchange_of(outputs[0])
        self.find_ids(keys)
        if self.ids is None:
            raise NotRecognised("its experts are not chosen by the ids of a token's choices", 2)
        if set(kept.values()) != ({_element(self.ids)} if self.ids.leaves[0].dropped else set()):
            raise NotRecognised("rows are dropped by other ids than the experts are chosen by", 3)
        capacity = self.capacity(limits)
        num_experts, expert, ranks = self.experts(exchange, away)
        scope = Scope(self.input_operand, self.weight_operand, expert, away, casts=set())
        if weights is not None:
            scope.take_weight(weights, "output")
        found = network(outputs[0], self.hidden, scope)
        if scope.input is None:
            raise NotRecognised("the experts do not read the tokens", 3)
        _check_casts(scope, scope.input)
        intermediate = extent(found.down)
        found = fuse(found, intermediate)
        num_experts = num_experts if num_experts is not None else _count_experts(found, ranks)
        self.check_experts(found, num_experts, ranks)
        weights = scope.weight
        if scale != 1.0:
            if weights is None:
                raise NotRecognised("the sum over the choices is scaled by a constant, without a router weight", 4)
            weights = replace(weights, scale=scale)
        group = (
            exchange.group if isinstance(exchange, Exchange) else exchange[1] if isinstance(exchange, tuple) else None
        )
        ids_leaf = self.ids.leaves[0]
        return Layer(
            x=scope.input,
            ids=self.ids,
            weights=weights,
            weight_on=scope.weight_on or "output",
            network=found,
            num_experts=num_experts,
            top_k=self.choices(),
            hidden=self.hidden_size,
            intermediate=intermediate,
            group=group,
            ranks=ranks,
            exchange=exchange if isinstance(exchange, Exchange) else None,
            capacity=capacity,
            clip_ids=complete and ids_leaf.bound is None,
        )

    # -- the sum over a token's choices ----------------------------------------------------------------------------

    def over_choices(self) -> tuple[Term, Term, bool]:
        """The choice variable and the summand; whether the summand was put together from one for each expert."""
        pieces = [piece for term in terms_of(uncast(self.value.body)) for piece in pieces_of(term, self.hidden)]
        variables = {piece.choice.args[1] for piece in pieces if piece.choice.op == "var"}
        if len(variables) > 1:
            raise NotRecognised("its terms sum over different numbers of choices", 1)
        choice = next((p.choice for p in pieces if p.choice.op == "var"), integer(0))
        by_key: dict[Term | None, list[tuple[int, Term]]] = {}
        for piece in pieces:
            rename = {piece.choice: choice} if piece.choice.op == "var" else {}
            key = None if piece.key is None else substitute(piece.key, rename)
            by_key.setdefault(key, []).append((piece.expert or 0, substitute(piece.body, rename)))
        self.choice = choice
        summands: list[Term] = []
        for key, bodies in by_key.items():
            if key is not None:
                summands.append(self.over_experts(key, bodies))
            elif choice.op == "var" and all(piece.choice.op == "var" for piece in pieces if piece.key is None):
                summands.append(add(body for _, body in bodies))  # a product and its bias, each summed
            else:
                summands += [body for _, body in bodies]
        if len(summands) == 1:
            return choice, summands[0], None not in by_key
        if choice.op == "var":
            raise NotRecognised("something is added to the sum over a token's choices that is no expert's output", 1)
        return (*self.over_known_choices(summands), None not in by_key)

    def over_known_choices(self, summands: Sequence[Term]) -> tuple[Term, Term]:
        """A sum that the program writes out choice by choice."""
        choice = var(len(summands))
        ordered = sorted(summands, key=first_choice)
        whole = generalise(ordered, choice)
        if whole is None and len(summands) == 2 and not all(s.depth for s in summands):
            return integer(0), add(summands)  # one choice: a product and its bias
        if whole is None:
            raise NotRecognised("the terms of a sum are not the same thing for each choice", 1)
        return choice, whole

    def over_experts(self, key: Term, summands: Sequence[tuple[int, Term]]) -> Term:
        """A sum that the program writes out expert by expert: the summand of the expert that `key` names."""
        ordered = sorted(summands, key=lambda item: item[0])
        experts = [expert for expert, _ in ordered]
        owners = [t for t in atoms(key) if t.op == "at"]
        if len(owners) == 1 and isinstance(owners[0].args[0], Leaf):
            self.ids = Operand(owners[0].args[0], owners[0].args[2:])
        expected = list(range(len(experts)))
        if experts != expected:
            raise NotRecognised(f"the loop over the experts visits {experts}, not each of {expected} once", 0)
        known = bound(key)
        if known is not None and len(experts) != known:
            raise NotRecognised(f"it sums over {len(experts)} of {known} experts", 1)
        if known is None:
            self.visited.add(len(experts))
        whole = generalise([body for _, body in ordered], key)
        if whole is None:
            raise NotRecognised(
                "the loop does not do the same for each expert: rows sorted by expert through the expert's own weights",
                2,
            )
        return whole

    # -- router weights, ids, x ------------------------------------------------------------------------------------

    def slot_operand(self, term: Term) -> Operand | None:
        """A tensor read at this token and this choice."""
        operand = operand_of(term, ())
        if operand is None or not isinstance(operand.leaf, Leaf):
            return None
        return operand if self.is_slot(operand) else None

    def is_slot(self, operand: Operand) -> bool:
        """Whether a tensor of all slots is read at this one."""
        shape = shape_of(operand.leaves[0].tensor)
        tokens = product(size_of(axis) for axis in self.token_axes)
        slot = lin([(self.token, self.choices()), (self.choice, 1)])
        return product(shape) == product((tokens, self.choices())) and radix(operand.index, shape) is slot

    def choices(self) -> Size:
        return self.choice.args[1] if self.choice.op == "var" else 1

    def split_weights(self, parts: Sequence[Term]) -> tuple[Operand | None, list[Term]]:
        weights: Operand | None = None
        outputs: list[Term] = []
        for part in parts:
            operand = self.weight_operand(part)
            if operand is None:
                outputs.append(part)
            elif weights is not None:
                raise NotRecognised("the router weight is applied more than once", 4)
            else:
                weights = operand
        return weights, outputs

    def weight_operand(self, term: Term) -> Operand | None:
        operand = self.slot_operand(term) or self.picked_operand(term)
        if operand is None or not operand.leaves[0].tensor.is_floating_point():
            return None
        return operand

    def picked_operand(self, term: Term) -> Operand | None:
        """A tensor of all experts read at this token and at the expert of this choice."""
        operand = operand_of(term, ())
        if operand is None or not isinstance(operand.leaf, Leaf) or not operand.index:
            return None
        (*tokens, last), shape = operand.index, shape_of(operand.leaf.tensor)
        ids = self.slot_operand(last)
        if ids is None or ids.leaf.bound != shape[-1] or ids.leaf.dropped:
            return None  # a position that may lie outside
        return replace(operand, picked=True) if radix(tokens, shape[:-1]) is self.token else None

    def input_operand(self, term: Term) -> Operand | None:
        operand = operand_of(term, ())
        if operand is None or not isinstance(operand.leaf, Leaf):
            return None
        shape = shape_of(operand.leaf.tensor)
        *tokens, last = operand.index
        return operand if radix(tokens, shape[:-1]) is self.token and last.op in ("var", "int") else None

    def expert_keys(self, term: Term) -> set[Term]:
        """The expert ids that weights are read at."""
        read = [index for node in subterms(term) if node.op == "at" for index in node.args[2:]]
        return {t for index in read for t in atoms(index) if t.op == "at"}

    def find_ids(self, keys: set[Term]) -> None:
        if len(keys) > 1:
            raise NotRecognised("its weights are read at different ids", 2)
        if keys:
            (key,) = keys
            operand = self.slot_operand(key)
            if operand is None:
                raise NotRecognised(
                    f"an expert's weight is read at `{describe(key)}`, which is not the id of this token's choice", 2
                )
            self.ids = operand

    def experts(self, exchange: object, away: tuple[object, ...]) -> tuple[Size | None, Term | None, int]:
        """How many experts there are, the term that picks one on its rank, and the number of ranks."""
        assert self.ids is not None
        key = _element(self.ids)
        if exchange is None:
            return self.ids.leaves[0].bound, key, 1
        if isinstance(exchange, Exchange):
            local, ranks = exchange.local_experts, exchange.ranks
            return local * ranks, mod(key, local), ranks
        if not is_equal(exchange):
            raise NotRecognised("its weights are on another rank than the rows of its experts", 2)
        assert isinstance(exchange, tuple)
        ranks, rank = exchange[2:]
        local = rank.args[1] if rank.op == "div" else 1
        if rank is not div(key, local):
            raise NotRecognised("rows go to another rank than the one that has their expert", 3)
        return local * ranks, mod(key, local), ranks

    def capacity(self, limits: set[Term]) -> Capacity | None:
        """How many slots an expert takes, if the summand counts only where the slot's place is lower.

        The slot must be this token's choice, numbered token by token or choice by choice, and its place be counted
        among all slots with this id: then the order of the sorted slots says which of them come earlier.
        """
        if not limits:
            return None
        if len(limits) > 1:
            raise NotRecognised("more than one capacity applies", 3)
        place, limit = limits.pop().args
        found = place_of(place)
        if found is None or not isinstance(found.order, Sort) or found.order.tie is not None:
            raise NotRecognised("rows are dropped by a condition that is not a place among the expert's rows", 3)
        tokens = product(s for axis in self.token_axes for s in sizes(axis))
        if self.ids is None or found.key is not _element(self.ids):
            raise NotRecognised("a capacity counts other ids than the experts are chosen by", 3)
        by_choice = lin([(self.choice, tokens), (self.token, 1)])
        by_token = lin([(self.token, self.choices()), (self.choice, 1)])
        orders = [name for name, slot in (("choice", by_choice), ("token", by_token)) if found.slot is slot]
        if not orders or found.order.size != tokens * self.choices():
            raise NotRecognised("an expert's places are given in another order than by token or by choice", 3)
        return Capacity(limit, orders[0])

    def check_experts(self, found: Network, num_experts: Size, ranks: int) -> None:
        assert self.ids is not None
        if self.visited - {num_experts}:
            raise NotRecognised(
                f"the loop visits {min(self.visited)} of the {num_experts} experts whose weights it reads", 1
            )
        local = num_experts // ranks if isinstance(num_experts, int) else num_experts
        for matrix in found.matrices():
            if matrix.expert is None and local != 1:
                raise NotRecognised("all experts read the same weight", 3)
            if isinstance(matrix.operand.leaf, Stack) and len(matrix.operand.leaf.leaves) != local:
                raise NotRecognised(
                    f"the loop visits {len(matrix.operand.leaf.leaves)} experts, but the router chooses among {local}",
                    1,
                )
        known = self.ids.leaves[0].bound
        if known is not None and known != num_experts:
            raise NotRecognised(f"the router chooses among {known} experts, but the layer has {num_experts}", 1)


def _constants(parts: list[Term]) -> tuple[float, list[Term]]:
    scale = 1.0
    rest: list[Term] = []
    for part in parts:
        if part.op == "const":
            scale *= part.args[0]
        else:
            rest.append(part)
    return scale, rest


MOVES = ("aten.index", "aten.gather", "aten.index_select", "aten.index_put", "aten.index_copy", "aten.scatter")
"""The ops that put rows in order."""


def _no_leftover(parts: Sequence[Term]) -> None:
    for part in parts:
        if part.op == "valid":
            raise NotRecognised("rows that no slot filled are read", 2)
        if part.perms:
            names = sorted({str(p) for p in part.perms})
            undone = (
                "is not undone by its own inverse" if len(names) == 1 else "are not all undone by their own inverses"
            )
            raise NotRecognised(
                f"the rows do not come back in the order in which they left: {', '.join(names)} {undone}",
                2,
                MOVES,
            )


def _exchange_of(term: Term) -> tuple[object, tuple[object, ...]]:
    """The exchange behind which the expert weights are, and the mark that they carry."""
    marks = {node.args[1] for node in subterms(term) if node.op == "at" and node.args[1]}
    if not marks:
        return None, ()
    if len(marks) > 1 or any(len(mark) != 1 for mark in marks):
        raise NotRecognised("rows leave by one group and come back by another", 2)
    (mark,) = marks
    return mark[0], mark


def _element(operand: Operand) -> Term:
    return at(operand.leaf, (), *operand.index)


def _count_experts(found: Network, ranks: int) -> Size:
    matrix = found.down
    if isinstance(matrix.operand.leaf, Stack):
        return len(matrix.operand.leaf.leaves) * ranks
    shape = shape_of(matrix.operand.leaf.tensor)
    for size, index in zip(shape, matrix.operand.index, strict=True):
        if index is matrix.expert:
            return size * ranks
    raise NotRecognised("the number of experts does not follow from the weights", 3)


def _check_casts(scope: Scope, x: Operand) -> None:
    for dtype in scope.casts or ():
        if dtype.itemsize < x.dtype.itemsize:
            raise NotRecognised(f"inside the expert values are rounded to {dtype}, coarser than its input {x.dtype}", 3)
