"""One node of a graph as one step of a picture: what it calls, what it means, how it is drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mokfx.page.meaning import Words
from mokfx.page.picture import Step
from mokfx.page.stages import Flow, is_weight
from mokfx.passes.layer import Layer
from mokfx.passes.reading import Reading
from mokfx.passes.region import Region
from mokfx.places import place_of_node
from mokfx.readable import short_name

FORM = frozenset(
    """bfloat16 clone contiguous detach double expand expand_as flatten float half int long mT permute reshape squeeze
    t to transpose type type_as unflatten unsqueeze view view_as wait_tensor""".split()  # noqa: SIM905
)
"""Calls that change the form of a value only."""
DTYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32"}
ROUTER = {
    "aten.mm": "router logits: a score for each expert",
    "aten.addmm": "router logits: a score for each expert",
    "aten._softmax": "router probabilities",
    "aten.sigmoid": "router probabilities",
    "aten.topk": "the highest scores, and where they are",
    "aten.div": "renormalised",
    "aten.mul": "scaled",
    "aten.add": "corrected for balance",
    "aten.gather": "the chosen ones",
}
SHARED = {
    "aten.silu": "shared expert: silu of the gate projection",
    "aten.sigmoid": "gate of the shared expert",
    "aten.mul": "shared expert: silu(gate) * up",
}


class Teller:
    """Makes the steps of one picture."""

    def __init__(
        self,
        reading: Reading,
        flow: Flow,
        words: Words,
        region: Region | None = None,
        said: dict[Node, str] | None = None,
    ) -> None:
        """
        Args:
            region: of the layer that the picture is of, if it was rewritten.
            said: the meanings of some nodes.
        """
        self.reading = reading
        self.flow = flow
        self.words = words
        self.region = region
        self.said = said or {}

    def steps(self, nodes: dict[Node, str]) -> list[Step]:
        """A step for each node; `nodes` has their stages, in the order of the graph."""
        position = {node: i for i, node in enumerate(nodes)}
        return [self._step(node, stage, position) for node, stage in nodes.items()]

    def _step(self, node: Node, stage: str, position: dict[Node, int]) -> Step:
        where, code = place_of_node(node)
        needs = sorted(self.flow.needs[node], key=self.flow.order.__getitem__)
        told = self.said.get(node) or self._operand(node)
        return Step(
            name=short_name(node.name),
            op=op_of(node),
            stage=stage,
            shape=shape_of(self.reading.values.get(node)),
            meaning=told or self._meaning(node, stage),
            where=where,
            code=code,
            inputs=tuple(position[need] for need in needs if need in position),
            weights=tuple(short_name(need.name) for need in needs if is_weight(need)),
            quiet=not told and (stage in ("input", "outside") or self._keeps_meaning(node)),
        )

    def _operand(self, node: Node) -> str:
        """What a node is to the layer, if the op reads it."""
        if self.region is None:
            return ""
        layer = self.region.found.layer
        for operand, text in (
            (layer.x, "the layer's input: the tokens"),
            (layer.ids, "the experts of each token"),
            (layer.weights, "router weights"),
        ):
            if operand is not None and any(self.region.operands[leaf] is node for leaf in operand.leaves):
                return text
        return ""

    def _meaning(self, node: Node, stage: str) -> str:
        value = self.reading.values.get(node)
        if isinstance(value, torch.SymInt):
            return self.words.of_index(self.reading.tracker.facts.scalar(value))
        if isinstance(value, tuple | list):
            if any(self._operand(user).startswith("the experts") for user in self.flow.users[node]):
                return "the best experts of each token, and their scores"
            return self.named(node, {"aten.topk": ROUTER["aten.topk"]})
        if stage == "shared" and self.region is not None and self.flow.multiplies(node):
            return self._shared_product(node, self.region.found.layer, self.region)
        named = self.named(node, {"router": ROUTER, "shared": SHARED}.get(stage, {}))
        fact = self.reading.tracker.said.get(node)
        if named or fact is None or not isinstance(value, torch.Tensor):
            return named
        return self.words.of(fact, value.is_floating_point())

    def named(self, node: Node, table: dict[str, str]) -> str:
        """What a table says of the first ATen op in it that a node makes."""
        calls = self.flow.calls.get(node, set())
        return next((text for name, text in table.items() if name in calls), "")

    def _shared_product(self, node: Node, layer: Layer, region: Region) -> str:
        behind = self.flow.needs[node] | {n for need in self.flow.needs[node] for n in self.flow.needs.get(need, ())}
        for name in ("gate", "up", "down"):
            matrix = getattr(layer.shared, name, None)
            if matrix is not None and any(region.operands[leaf] in behind for leaf in matrix.operand.leaves):
                fused = name == "gate" and layer.shared is not None and layer.shared.up is None
                return f"shared expert: {'gate and up projections' if fused else f'{name} projection'}"
        return "gate of the shared expert"

    def _keeps_meaning(self, node: Node) -> bool:
        """Whether a node only changes the form of what it is given, or takes a number out of it."""
        value = self.reading.values.get(node)
        number = isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and value.dim() == 0)
        if number or op_of(node) in FORM:
            return True
        values = [self.reading.values.get(need) for need in self.flow.needs[node]]
        return op_of(node) == "getitem" and len(values) == 1 and isinstance(values[0], tuple | list)


def op_of(node: Node) -> str:
    """The bare name of what a node calls; "" of an input."""
    if node.op in ("placeholder", "get_attr", "output"):
        return "return" if node.op == "output" else ""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.split(".")[0]


def shape_of(value: Any) -> str:
    """`bf16[16, 2048]`; how many values a list has; "" of other things."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{DTYPES.get(dtype, dtype)}[{', '.join(map(_size, value.shape))}]"
    if isinstance(value, torch.SymInt):
        return "a number"
    return f"{len(value)} values" if isinstance(value, tuple | list) and len(value) > 1 else ""


def _size(size: int | torch.SymInt) -> str:
    """A dimension; "rows" where it is a number of rows that routing decides."""
    return "rows" if isinstance(size, torch.SymInt) and free_unbacked_symbols(size) else str(size)
