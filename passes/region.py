"""Which nodes a layer's op replaces, and whether it may.

The region is what only the layer's output needs. It is erased explicitly: dead-code elimination would keep
`wait_tensor` and the assertions on sizes, and delete an in-place change whose result nobody names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from mokfx.passes.facts import storage_of
from mokfx.passes.interpret import Found, GraphRun, Tracker
from mokfx.passes.terms import Term, as_size, subterms
from mokfx.passes.value import Leaf, Stack


class NotLegal(Exception):
    """Why a recognised layer must stay as it is, and the node that the reason is about."""

    def __init__(self, reason: str, node: Node) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


ASSERTIONS = frozenset(
    (
        "_assert_scalar",
        "_check",
        "_check_is_size",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "_assert_async",
    )
)


class Dependencies:
    """What each node needs: its arguments, and the in-place changes that they have had by then."""

    def __init__(self, graph: Graph, run: GraphRun, tracker: Tracker) -> None:
        self.run = run
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.of: dict[Node, set[Node]] = {}
        self.written_by: dict[Node, set[int]] = defaultdict(set)
        for node, storage in tracker.writes:
            self.written_by[node].add(storage)
        self.made_at: dict[int, Node] = {}
        self.writers: dict[int, list[Node]] = defaultdict(list)
        last: dict[int, Node] = {}
        for node in graph.nodes:
            needs = set(node.all_input_nodes)
            for argument in node.all_input_nodes:
                needs |= {last[s] for s in self.storages(argument) if s in last}
            self.of[node] = needs
            for storage in self.written_by.get(node, ()):
                last[storage] = node
                self.writers[storage].append(node)
            for storage in self.storages(node):
                self.made_at.setdefault(storage, node)

    def storages(self, node: Node) -> set[int]:
        return {storage_of(t) for t in tensors_of(self.run.env.get(node))}

    def closure(self, nodes: Iterable[Node], without: frozenset[tuple[Node, Node]] = frozenset()) -> set[Node]:
        """`nodes` and all that they need, except along the edges `without`."""
        seen: set[Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            todo.extend(d for d in self.of[node] if (node, d) not in without)
        return seen


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_of(item)]
    return []


@dataclass
class Region:
    """What becomes of each node around one layer."""

    found: Found
    aliases: list[Node]
    """Nodes whose value is the layer's output."""
    erased: list[Node]
    kept: list[Node]
    """Nodes of the layer that something else uses too."""
    operands: dict[Leaf, Node]


def region_of(found: Found, graph: Graph, run: GraphRun, tracker: Tracker, needs: Dependencies) -> Region:
    """The region of a layer.

    Raises:
        NotLegal: erasing it would change what the rest of the program sees.
    """
    operands = {leaf: _node_of(leaf, found, graph, run, tracker) for op in found.layer.operands() for leaf in op.leaves}
    aliases = _aliases(found, graph, run, needs)
    root = found.node
    after = needs.order[root]
    candidates = needs.closure([root, *aliases])
    replaced = _replaced_edges(aliases, root, needs, graph, after)
    given = needs.closure([*operands.values(), *_writers_before(operands, needs, after), *_numbers(found, graph, run)])
    inside = _about(candidates - given, graph, needs, replaced)
    own = candidates - given
    satellites = {n for n in inside - candidates if _asserts(n) or _writes_only_to(own, n, needs)}
    anchors = [n for n in graph.nodes if n not in candidates and n not in satellites and _must_stay(n, needs)]
    live = needs.closure(anchors, replaced) | given
    dead = _dead(graph, live, candidates | satellites, needs)
    region = Region(found, aliases, dead, [n for n in graph.nodes if n in live & candidates - given], operands)
    _check_kept(region, run, tracker, graph)
    _check_changes(region, needs)
    return region


def _aliases(found: Found, graph: Graph, run: GraphRun, needs: Dependencies) -> list[Node]:
    """Nodes whose value is the layer's output, up to where something changes it in place: `y += x`."""
    changes = [w for w in needs.writers[storage_of(found.tensor)] if needs.order[w] > needs.order[found.node]]
    end = min((needs.order[w] for w in changes), default=len(needs.order))
    return [n for n in graph.nodes if run.env.get(n) is found.tensor and needs.order[n] < end]


def _node_of(leaf: Leaf, found: Found, graph: Graph, run: GraphRun, tracker: Tracker) -> Node:
    for node in graph.nodes:
        if run.env.get(node) is leaf.tensor:
            break
    else:
        raise NotLegal(
            f"a tensor that the layer reads is computed inside `{leaf.node.name}` and has no name", leaf.node
        )
    if tracker.facts.version(leaf.tensor) != leaf.version:
        writes = [n for n, s in tracker.writes if s == storage_of(leaf.tensor)]
        raise NotLegal(f"`{node.name}`, which the layer reads, is changed in place after that", writes[-1])
    return node


def _numbers(found: Found, graph: Graph, run: GraphRun) -> list[Node]:
    """The node of a capacity that the graph computes."""
    capacity = found.layer.capacity
    size = None if capacity is None or capacity.limit.op != "int" else capacity.limit.args[0]
    if size is None or isinstance(size, int):
        return []
    numbers = [n for n in graph.nodes if isinstance(run.env.get(n), torch.SymInt) and as_size(run.env[n]) == size]
    return numbers[:1]


def _replaced_edges(
    aliases: list[Node], root: Node, needs: Dependencies, graph: Graph, after: int
) -> frozenset[tuple[Node, Node]]:
    """Uses of the layer's output: they will use the op's result, and so will the views that they make of it."""
    edges: set[tuple[Node, Node]] = set()
    storages = {s for alias in aliases for s in needs.storages(alias)}
    writers = {w for s in storages for w in needs.writers[s] if needs.order[w] <= after}
    renewed = set(aliases)
    for node in graph.nodes:
        if needs.order[node] <= after:
            continue
        reads = {a for a in node.all_input_nodes if needs.storages(a) & storages}
        if not reads or not reads <= renewed:
            continue
        edges |= {(node, a) for a in reads if a in aliases} | {(node, w) for w in writers}
        renewed.add(node)
    return frozenset(edges)


def _writers_before(operands: dict[Leaf, Node], needs: Dependencies, after: int) -> list[Node]:
    return [
        w
        for node in operands.values()
        for s in needs.storages(node)
        for w in needs.writers[s]
        if needs.order[w] <= after
    ]


def _asserts(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "").split(".")[0] in ASSERTIONS


def _writes_only_to(layer: set[Node], node: Node, needs: Dependencies) -> bool:
    """Whether all that a node does is to change what the layer made: if that is not read, the change is nothing."""
    written = needs.written_by.get(node, ())
    return bool(written) and all(needs.made_at.get(storage) in layer for storage in written)


def _about(layer: set[Node], graph: Graph, needs: Dependencies, replaced: frozenset[tuple[Node, Node]]) -> set[Node]:
    """Nodes that use what is computed inside the layer, other than its output."""
    about: set[Node] = set()
    for node in graph.nodes:
        if node in layer or any(d in about and (node, d) not in replaced for d in needs.of[node]):
            about.add(node)
    return about


def _must_stay(node: Node, needs: Dependencies) -> bool:
    if node.op in ("output", "placeholder"):
        return True
    return bool(needs.written_by.get(node)) or node.is_impure()


def _dead(graph: Graph, live: set[Node], about: set[Node], needs: Dependencies) -> list[Node]:
    """Nodes of the region that nothing needs, and what is left hanging on them."""
    dead: set[Node] = set()
    for node in graph.nodes:
        if node in live or node.op in ("placeholder", "output"):
            continue
        if node in about or any(d in dead for d in node.all_input_nodes):
            dead.add(node)
    return [n for n in graph.nodes if n in dead]


def _check_kept(region: Region, run: GraphRun, tracker: Tracker, graph: Graph) -> None:
    """Only what routing decides may be used outside: not rows on their way, not what an expert computed."""
    inputs = {id(leaf) for leaf in region.found.layer.x.leaves}
    inside = {*region.kept, *region.erased}
    for node in sorted(region.kept, key=lambda n: all(user in inside for user in n.users)):
        for tensor in tensors_of(run.env.get(node)):
            value = tracker.facts.get(tensor)
            if value is None or not tensor.is_floating_point():
                continue
            if value.body.routed and ((value.body.depth > 0 and not _counts(value.body)) or _reads(value.body, inputs)):
                user = next((u for u in node.users if u not in inside), node)
                place = user if user.meta.get("stack_trace") else node
                raise NotLegal(f"`{node.name}`, made inside the layer, is used outside of it (by `{user.name}`)", place)
    for node in region.kept:
        if isinstance(run.env.get(node), torch.SymInt | torch.SymBool):
            raise NotLegal(f"`{node.name}`, a number of rows read inside the layer, is used outside of it", node)


def _counts(term: Term) -> bool:
    """Whether a term holds indicators and counts only."""
    elements = [node for node in subterms(term) if node.op == "at" and not isinstance(node.args[0], Stack)]
    return term.depth <= 1 and all(node.args[0].definition is not None or not node.looked_up for node in elements)


def _reads(term: Term, leaves: set[int]) -> bool:
    return any(node.op == "at" and id(node.args[0]) in leaves for node in subterms(term))


def _check_changes(region: Region, needs: Dependencies) -> None:
    """Nothing outside may be changed in place by what is erased."""
    erased = set(region.erased)
    for node in region.erased:
        for storage in needs.written_by.get(node, ()):
            maker = needs.made_at.get(storage)
            if maker is not None and maker not in erased:
                raise NotLegal(f"the layer changes `{maker.name}`, a tensor from outside of it, in place", node)


def erase(graph: Graph, region: Region) -> None:
    """Remove the region's nodes, last first."""
    for node in reversed(region.erased):
        graph.erase_node(node)
    _drop_empty_modes(graph)


def _drop_empty_modes(graph: Graph) -> None:
    """Remove mode switches that no longer surround anything."""
    previous: Node | None = None
    for node in list(graph.nodes):
        if previous is not None and _cancels(previous, node):
            target = node.target
            before = previous.prev
            if target is torch.amp.autocast_mode._exit_autocast:
                graph.erase_node(node)
            graph.erase_node(previous)
            previous = before if before.op == "call_function" else None
            if target is not torch.amp.autocast_mode._exit_autocast:
                previous = node
            continue
        previous = node


def _cancels(first: Node, second: Node) -> bool:
    if first.op != "call_function" or second.op != "call_function":
        return False
    if first.target is torch.amp.autocast_mode._enter_autocast:
        return second.target is torch.amp.autocast_mode._exit_autocast and second.args[0] is first
    switch = torch._C._set_grad_enabled
    return first.target is switch and second.target is switch and not first.users
