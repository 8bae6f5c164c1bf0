"""Write the op's call into the graph: each operand as a view of a tensor that the graph has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from mokfx.passes.facts import shape_of
from mokfx.passes.layer import Layer, Matrix, Network, Operand
from mokfx.passes.region import NotLegal, Region
from mokfx.passes.terms import Size, Term, as_size
from mokfx.passes.value import Leaf, Stack

aten = torch.ops.aten


class Emitter:
    """Builds one call behind the node that completed the layer."""

    def __init__(self, graph: Graph, region: Region, env: dict[Node, Any]) -> None:
        self.graph = graph
        self.region = region
        self.layer: Layer = region.found.layer
        self.env = env
        self.values: dict[Node, Any] = {}

    def emit(self) -> Node:
        """The node that stands for the layer's output, in its dtype and shape."""
        layer, tensor = self.layer, self.region.found.tensor
        self.at = self.region.found.node
        x = self.rows(layer.x, layer.hidden)
        ids = self.ids(layer.ids)
        weights = self.weights(ids, x)
        call = self.call(torch.ops.mok.moe.default, (x, ids, weights, *self.experts(layer.network)), self.settings(x))
        if tensor.dim() != 2:
            call = self.call(aten.reshape.default, (call, [*self.sizes(tensor)]))
        return call

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        kwargs = kwargs or {}
        with self.graph.inserting_after(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["stack_trace"] = self.region.found.node.meta.get("stack_trace")
        flat = torch.fx.map_arg((args, kwargs), self.value)
        value = target(*flat[0], **flat[1])
        node.meta["example_value"] = value
        self.values[node] = value
        self.at = node
        return node

    def value(self, node: Node) -> Any:
        return self.values[node] if node in self.values else self.env[node]

    # -- tokens ----------------------------------------------------------------------------------------------------

    def given(self, operand: Operand, leaf: Leaf | None = None) -> Node:
        return self.region.operands[leaf if leaf is not None else operand.leaves[0]]

    def cast(self, node: Node, operand: Operand) -> Node:
        for dtype in operand.casts:
            node = self.call(aten.to.dtype, (node, dtype))
        return node

    def rows(self, operand: Operand, width: Size) -> Node:
        node = self.given(operand)
        if self.value(node).dim() != 2:
            node = self.call(aten.reshape.default, (node, [-1, self.plain(width)]))
        return self.cast(node, operand)

    def ids(self, operand: Operand) -> Node:
        node = self.slots(operand)
        if self.layer.clip_ids:
            inside = self.call(aten.ge.Scalar, (node, 0))
            below = self.call(aten.lt.Scalar, (node, self.plain(self.layer.num_experts)))
            inside = self.call(aten.logical_and.default, (inside, below))
            node = self.call(aten.masked_fill.Scalar, (node, self.call(aten.logical_not.default, (inside,)), -1))
        return node

    def slots(self, operand: Operand) -> Node:
        node = self.given(operand)
        value = self.value(node)
        shape = shape_of(value)
        if len(shape) != 2 or shape[1] != self.layer.top_k:
            node = self.call(aten.reshape.default, (node, [-1, self.plain(self.layer.top_k)]))
        if not value.is_floating_point() and value.dtype not in (torch.int32, torch.int64):
            node = self.call(aten.to.dtype, (node, torch.int64))
        return node

    def weights(self, ids: Node, x: Node) -> Node:
        operand = self.layer.weights
        if operand is None:
            return self.call(aten.ones_like.default, (ids,), {"dtype": self.value(x).dtype})
        node = self.cast(self.picked(operand, ids) if operand.picked else self.slots(operand), operand)
        return node if operand.scale == 1.0 else self.call(aten.mul.Tensor, (node, operand.scale))

    def picked(self, operand: Operand, ids: Node) -> Node:
        """Of a tensor [T, E] the numbers of the experts that were chosen."""
        scores = self.rows(replace(operand, casts=()), self.layer.num_experts)
        if self.value(ids).dtype != torch.int64:
            ids = self.call(aten.to.dtype, (ids, torch.int64))
        return self.call(aten.gather.default, (scores, 1, ids))

    # -- experts ---------------------------------------------------------------------------------------------------

    def experts(self, network: Network) -> tuple[list[Node], list[Node], list[Node]]:
        fused = network.layout != "apart"
        gate = [] if network.gate is None else self.matrices(network.gate, fused)
        up = [] if network.up is None or fused else self.matrices(network.up)
        return gate, up, self.matrices(network.down)

    def settings(self, x: Node) -> dict[str, Any]:
        layer, network = self.layer, self.layer.network
        fused = network.layout != "apart"
        settings: dict[str, Any] = {}
        if network.gate_bias is not None:
            settings["b_gate"] = self.matrices(network.gate_bias, fused)
        if network.up_bias is not None and not fused:
            settings["b_up"] = self.matrices(network.up_bias)
        if network.down_bias is not None:
            settings["b_down"] = self.matrices(network.down_bias)
        if layer.shared is not None:
            gate, up, down = self.experts(layer.shared)
            settings["shared_w_gate"], settings["shared_w_down"] = gate[0], down[0]
            if up:
                settings["shared_w_up"] = up[0]
            if layer.shared_gate is not None:
                settings["shared_sigmoid"] = self.column(layer.shared_gate)
        settings["num_experts"] = self.plain(layer.num_experts)
        optional: dict[str, tuple[Any, Any]] = {
            "gate_up": (network.layout, "apart"),
            "activation": (network.activation, "swiglu"),
            "activation_args": (list(network.arguments), []),
            "weight_on": (layer.weight_on, "output"),
            "group_name": (layer.group, None),
            "out_dtype": (self.region.found.tensor.dtype, self.value(x).dtype),
        }
        settings |= {name: value for name, (value, default) in optional.items() if value != default}
        if layer.capacity is not None:
            settings["capacity"] = self.number(layer.capacity.limit)
            settings |= {"capacity_order": "token"} if layer.capacity.order == "token" else {}
        return settings

    def matrices(self, matrix: Matrix, whole: bool = False) -> list[Node]:
        """An expert operand in the op's order of dimensions: stacked, or one for each expert."""
        operand = matrix.operand
        index = operand.index[1:] if isinstance(operand.leaf, Stack) else operand.index
        return [self.matrix(self.given(operand, leaf), index, matrix, whole) for leaf in operand.leaves]

    def matrix(self, node: Node, index: Sequence[Term], matrix: Matrix, whole: bool) -> Node:
        roles = [self.role(term, matrix) for term in index]
        for d in reversed(range(len(index))):
            if roles[d] == "fixed":
                node = self.call(aten.select.int, (node, d, index[d].args[0]))
        live = [(r, t) for r, t in zip(roles, index, strict=True) if r != "fixed"]
        node, live = self.split(node, live, matrix)
        if not whole:
            for d, (role, term) in enumerate(live):
                if role == "outputs":
                    node = self.columns(node, d, term, matrix.outputs)
        present = [role for role, _ in live]
        wanted = [role for role in ("expert", "inputs", "outputs") if role in present]
        if present != wanted:
            if sorted(present) != sorted(wanted):
                raise NotLegal("a weight's dimensions cannot be told apart", self.region.found.node)
            order = [present.index(role) for role in wanted]
            swapped = order[:-2] == list(range(len(order) - 2))
            node = (
                self.call(aten.transpose.int, (node, -2, -1))
                if swapped
                else self.call(aten.permute.default, (node, order))
            )
        return self.cast(node, matrix.operand)

    def role(self, term: Term, matrix: Matrix) -> str:
        names = [
            name
            for name, variable in (("inputs", matrix.inputs), ("outputs", matrix.outputs))
            if variable is not None and variable.op == "var" and variable in term.free
        ]
        if matrix.expert is not None and matrix.expert.op != "int" and self.has_expert(term, matrix.expert):
            names.insert(0, "expert")
        if not names and term.op == "int":
            return "fixed"
        return "+".join(names)

    def has_expert(self, term: Term, expert: Term) -> bool:
        return term is expert or (term.op == "lin" and any(t is expert for t, _ in term.args[1]))

    def split(self, node: Node, live: list[tuple[str, Term]], matrix: Matrix) -> tuple[Node, list[tuple[str, Term]]]:
        """Divide a dimension that runs over the experts and over a matrix dimension."""
        for d, (role, term) in enumerate(live):
            if not role.startswith("expert+"):
                continue
            other = matrix.inputs if role == "expert+inputs" else matrix.outputs
            assert other is not None
            parts = dict(term.args[1])
            width = parts.get(matrix.expert)
            if parts.get(other) != 1 or width != other.args[1] or term.args[0] != 0 or len(parts) != 2:
                raise NotLegal("a weight's dimensions cannot be told apart", self.region.found.node)
            node = self.call(aten.unflatten.int, (node, d, [-1, self.plain(width)]))
            return node, [*live[:d], ("expert", term), (role.split("+")[1], other), *live[d + 1 :]]
        return node, live

    def columns(self, node: Node, d: int, term: Term, outputs: Term) -> Node:
        """The columns of a wider tensor that are this matrix."""
        stride, offset = (1, 0) if term is outputs else (dict(term.args[1])[outputs], term.args[0])
        size = outputs.args[1]
        if (stride, offset) == (1, 0) and shape_of(self.value(node))[d] == size:
            return node
        end = offset + stride * (size - 1) + 1
        return self.call(aten.slice.Tensor, (node, d, offset, end, stride))

    def column(self, matrix: Matrix) -> Node:
        """The shared expert's gate as [H, 1]."""
        node = self.cast(self.given(matrix.operand), matrix.operand)
        value = self.value(node)
        if value.dim() == 1:
            return self.call(aten.unsqueeze.default, (node, -1))
        last = matrix.operand.index[-1]
        transposed = matrix.inputs is not None and matrix.inputs in last.free
        return self.call(aten.transpose.int, (node, 0, 1)) if transposed else node

    # -- numbers ---------------------------------------------------------------------------------------------------

    def plain(self, size: Size) -> int | Node:
        return size if isinstance(size, int) else self.symbol(size)

    def number(self, term: Term) -> int | Node:
        if term.op == "int" and isinstance(term.args[0], int):
            return term.args[0]
        if term.op in ("int", "size"):
            return self.symbol(term.args[0])
        raise NotLegal("the capacity is not a number that the graph has", self.region.found.node)

    def symbol(self, expression: Any) -> Node:
        for node, value in self.env.items():
            if isinstance(value, torch.SymInt) and as_size(value) == expression and not self.is_erased(node):
                return node
        raise NotLegal(f"the size {expression} is not a number that the graph has", self.region.found.node)

    def is_erased(self, node: Node) -> bool:
        return node in self.region.erased

    def sizes(self, tensor: torch.Tensor) -> list[Any]:
        """The leading sizes of the output, read from the input where they are the same."""
        x = self.region.operands[self.layer.x.leaves[0]]
        value = self.value(x)
        if shape_of(value) == shape_of(tensor):
            return [
                s if isinstance(s, int) else self.call(aten.sym_size.int, (x, d)) for d, s in enumerate(value.shape)
            ]
        return [s if isinstance(s, int) else self.symbol(as_size(s)) for s in tensor.shape]
