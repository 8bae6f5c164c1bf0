"""Which part of an MoE layer each node of the captured graph is: router, dispatch, experts, shared expert, combine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch.fx import Node

from mokfx.passes.layer import Network
from mokfx.passes.reading import Reading
from mokfx.passes.region import Region

PRODUCTS = frozenset(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm"))


class Flow:
    """The captured graph as sets of nodes: what each needs, what uses it, which ATen ops it made."""

    def __init__(self, reading: Reading) -> None:
        self.needs: Mapping[Node, set[Node]] = reading.needs
        self.values = reading.values
        self.order = {node: i for i, node in enumerate(self.needs)}
        self.calls: dict[Node, set[str]] = defaultdict(set)
        for node, name in reading.tracker.calls:
            self.calls[node].add(name)

    @cached_property
    def users(self) -> Mapping[Node, set[Node]]:
        users: dict[Node, set[Node]] = {node: set() for node in self.needs}
        for node, needs in self.needs.items():
            for need in needs:
                users[need].add(node)
        return users

    def before(self, nodes: Iterable[Node], within: set[Node] | None = None) -> set[Node]:
        """`nodes` and all that they need, as far as it is `within`."""
        return _closure(nodes, self.needs, within)

    def after(self, nodes: Iterable[Node], within: set[Node] | None = None) -> set[Node]:
        """`nodes` and all that needs them, as far as it is `within`."""
        return _closure(nodes, self.users, within)

    def is_index(self, node: Node) -> bool:
        """Whether a node computes integers, by which matrices can be chosen."""
        value = self.values.get(node)
        return isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and not value.is_floating_point())

    def multiplies(self, node: Node) -> bool:
        return not PRODUCTS.isdisjoint(self.calls.get(node, ()))


def stages_of(region: Region, flow: Flow, taken: set[Node]) -> dict[Node, str]:
    """The stage of each node that makes up a layer, in the order of the graph.

    Args:
        taken: nodes of other layers, which are none of this one's.
    """
    layer = region.found.layer
    inside = {*region.erased, *region.kept} - taken
    experts, products = _network(layer.network, region, flow, inside)
    shared: set[Node] = set()
    if layer.shared is not None:
        shared, shared_products = _network(layer.shared, region, flow, inside)
        gates = () if layer.shared_gate is None else layer.shared_gate.operand.leaves
        _, gate_products = _products([region.operands[leaf] for leaf in gates], flow, inside)
        alone = flow.after([*shared_products, *gate_products], inside) - flow.after(products, inside)
        shared = (shared | alone) - experts
    sent = flow.before(products, inside)
    stages: dict[Node, str] = dict.fromkeys(_router(region, flow) - taken, "router")
    for node in inside - stages.keys():
        known = "experts" if node in experts else "shared" if node in shared else ""
        stages[node] = known or ("dispatch" if node in sent else "combine")
    return dict(sorted(stages.items(), key=lambda item: flow.order[item[0]]))


def is_weight(node: Node) -> bool:
    """Whether a node is a parameter, buffer or constant of the model, and no input of the call."""
    return node.op == "get_attr" or (node.op == "placeholder" and node.name.lower().startswith(("l_self_", "l_fn_")))


def _network(network: Network, region: Region, flow: Flow, inside: set[Node]) -> tuple[set[Node], set[Node]]:
    """The nodes of a network and, among them, its products with its matrices."""
    leaves = [leaf for matrix in network.matrices() for leaf in matrix.operand.leaves]
    prepared, products = _products([region.operands[leaf] for leaf in leaves], flow, inside)
    between = flow.after(products, inside) & flow.before(products, inside)
    return prepared | between, products


def _products(matrices: list[Node], flow: Flow, inside: set[Node]) -> tuple[set[Node], set[Node]]:
    """The products that read these matrices, and the views, casts and choices of them on the way there."""
    prepared: set[Node] = set()
    products: set[Node] = set()
    todo = [user for matrix in matrices for user in flow.users.get(matrix, ())]
    while todo:
        node = todo.pop()
        if node not in inside or node in prepared or node in products:
            continue
        if flow.multiplies(node):
            products.add(node)
        elif all(is_weight(need) or need in prepared or flow.is_index(need) for need in flow.needs[node]):
            prepared.add(node)
            todo.extend(flow.users[node])
    return prepared, products


def _router(region: Region, flow: Flow) -> set[Node]:
    """What chooses and weighs the experts: from the layer's input, or from the product that scores the experts."""
    layer = region.found.layer
    operands = [layer.ids] if layer.weights is None else [layer.ids, layer.weights]
    ends = [region.operands[leaf] for operand in operands for leaf in operand.leaves]
    given = flow.before([region.operands[leaf] for leaf in layer.x.leaves])
    found: set[Node] = set()
    todo = [(node, False) for node in ends]
    while todo:
        node, scored = todo.pop()
        if node in given or node in found or node.op in ("placeholder", "get_attr"):
            continue
        needs = {need for need in flow.needs[node] if not is_weight(need)}
        scored = scored or flow.multiplies(node)
        if scored and not flow.multiplies(node) and len(needs) > 1:
            continue  # before the scores only the form of the input changes
        found.add(node)
        todo.extend((need, scored) for need in needs)
    return found


def _closure(nodes: Iterable[Node], edges: Mapping[Node, set[Node]], within: set[Node] | None) -> set[Node]:
    seen: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node in seen or (within is not None and node not in within):
            continue
        seen.add(node)
        todo.extend(edges.get(node, ()))
    return seen
