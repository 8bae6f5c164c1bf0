"""Run a captured graph on its fake tensors and record what each tensor means.

Every spelling of an op (function, method, operator, a composite like `einsum`) reaches `Tracker` as the same few ATen
calls, each under the graph node that made it. The graph itself is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from mokfx.passes import rules
from mokfx.passes.anchors import Anchors, operands
from mokfx.passes.custom_ops import in_aten
from mokfx.passes.facts import Facts, shape_of, storage_of
from mokfx.passes.functions import function_of, outputs_of, why_not_mirror
from mokfx.passes.layer import Layer
from mokfx.passes.mixtures import Mixture, mixture
from mokfx.passes.owners import ids_behind, is_rows, reads_matrices
from mokfx.passes.recognise import Refusal, recognise
from mokfx.passes.rules.table import RULES, Call
from mokfx.passes.terms import Size, Term, apply, at
from mokfx.passes.value import Leaf, Value, leaf_value, resized, size_of

assert rules


@dataclass
class Unread:
    """A call that has no rule although its inputs came from routing: where understanding ended."""

    name: str
    node: Node
    inputs: tuple[Value, ...]
    group: str | None = None
    """The group of an exchange."""


@dataclass
class Found:
    """A tensor that is the MoE of x, and the node during which it became so."""

    layer: Layer
    tensor: torch.Tensor
    node: Node
    shape: tuple[Size, ...]
    """The tensor's sizes, where they are counts of all rows as the number that they must be."""


class Tracker(TorchDispatchMode):
    """Sees every ATen call of a graph and gives its output a fact."""

    def __init__(self, gradients: bool) -> None:
        super().__init__()
        self.facts = Facts()
        self.node: Node = None  # type: ignore[assignment]
        self.gradients = gradients
        self.node_has_gradients = gradients
        """The grad mode around the current node; an op may switch it off for its own inside."""
        self.inside_function = 0
        self.found: list[Found] = []
        self.functions: list[tuple[Node, str]] = []
        """User functions on routed rows that are not part of a layer, and why."""
        self.function_inputs: dict[Node, tuple[Value, ...]] = {}
        self.cuts: list[tuple[Node, set[object]]] = []
        """Where a gradient ends that the op would give, and whose rows it is about."""
        self.calls: list[tuple[Node, str]] = []
        self.anchors = Anchors()
        """What looks like a layer."""
        self.mixtures: dict[Leaf, tuple[Node, Mixture]] = {}
        """Sums over all experts, by their weights."""
        self.refusals: list[tuple[Node, Refusal, set[object]]] = []
        """Sums over experts or choices that are not the MoE of anything."""
        self.unread: list[Unread] = []
        self.writes: list[tuple[Node, int]] = []
        """Each in-place change: the node that made it and the storage that it changed."""
        self.said: dict[Node, Value] = {}
        """The fact of each node's tensor when the node had run; later ones may change the tensor in place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "prim":
            self._record(Call(self, *in_aten(func, args, kwargs), out))
        return out

    def value(self, tensor: torch.Tensor) -> Value:
        value = self.facts.get(tensor)
        return self.facts.leaf(tensor, self.node) if value is None else value

    def given(self, tensor: torch.Tensor) -> Value:
        """The fact about a tensor that routing will index: an element of it, not how it was computed."""
        value = self.value(tensor)
        body = value.body
        if not tensor.is_floating_point() or body.routed or (not body.looked_up and body.op in ("at", "cast", "const")):
            return value
        leaf = Leaf(tensor, self.node, self.facts.version(tensor), definition=value)
        return leaf_value(leaf, shape_of(tensor))

    def recorded(self, tensor: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """`known` in place of `tensor`, if they differ in the names of sizes that are data; it means the same."""
        if shape_of(tensor) == shape_of(known) or tensor.dim() != known.dim():
            return tensor
        value = self.facts.get(tensor)
        if value is not None:
            for old, new in zip(shape_of(tensor), shape_of(known), strict=True):
                self.facts.rename_size(old, new)
            self.facts.set(known, resized(value, shape_of(known)))
        return known

    # -- recording -------------------------------------------------------------------------------------------------

    def _record(self, call: Call) -> None:
        target = call["self"]
        self.calls.append((self.node, call.name))
        before = [self.facts.get(t) for t in operands(call)]
        writes = [
            call.arguments[a.name]
            for a in call.func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and isinstance(call[a.name], torch.Tensor)
        ]
        if writes:
            if before:
                self.anchors.see(call, self.node, before, None)
            self._record_write(call, writes)
            return
        result = self._apply_rule(call)
        outs = call.out if isinstance(call.out, list | tuple) else [call.out]
        values = result if isinstance(result, list | tuple) else [result] * len(outs)
        if len(values) != len(outs):
            values = [None] * len(outs)
        routed = [v for v in self._inputs(call) if v.body.routed]
        if before:
            self.anchors.see(call, self.node, before, result)
        unknown = False
        for i, (out, value) in enumerate(zip(outs, values, strict=True)):
            if not isinstance(out, torch.Tensor):
                continue
            if self.facts.get(out) is not None and value is None:
                continue  # an op that returned its input
            self._assign(out, value, call)
            unknown |= value is None
            if isinstance(target, torch.Tensor) and out is not target and storage_of(out) == storage_of(target):
                self.facts.add_view(out, target, ViewOf(call, i if isinstance(call.out, list | tuple) else None))
        if unknown and not routed and call.name in JOINS:
            routed = [v for v in self._inputs(call) if reads_matrices(v.body)]
        if unknown and routed:
            self.unread.append(Unread(call.name, self.node, tuple(routed), call["group_name"]))

    def _record_write(self, call: Call, writes: list[torch.Tensor]) -> None:
        result = RULES[call.name](call) if call.name in RULES and len(writes) == 1 else None
        result = self._cut_gradient(result, call) if isinstance(result, Value) else None
        routed = tuple(v for v in self._inputs(call) if v.body.routed)
        inputs = tuple(self._inputs(call))
        for tensor in writes:
            self.writes.append((self.node, storage_of(tensor)))
            self.facts.write(tensor, result)
            if result is None:
                self.facts.leaf(tensor, self.node, made_by=call.name, inputs=inputs)
            else:
                self._assign(tensor, result, call)
        if result is None and routed:
            self.unread.append(Unread(call.name, self.node, routed))

    def _apply_rule(self, call: Call) -> Any:
        function = RULES.get(call.name)
        if function is None:
            return None
        result = function(call)
        if isinstance(result, Value):
            return self._cut_gradient(result, call)
        if isinstance(result, list | tuple):
            return [r if r is None else self._cut_gradient(r, call) for r in result]
        return result

    def _cut_gradient(self, value: Value, call: Call) -> Value:
        """Mark what is computed without a gradient: the op would give one."""
        if not self.gradients or self.node_has_gradients or self.inside_function or not call.is_float:
            return value
        return value.with_body(apply("detached", value.body)) if _needs_mark(value) else value

    def _assign(self, out: torch.Tensor, value: Value | None, call: Call) -> None:
        inputs = tuple(call.value(a) for a in call.arguments.values() if isinstance(a, torch.Tensor))
        if value is None:
            self.facts.leaf(out, self.node, made_by=call.name, inputs=inputs)
            return
        body = value.body
        if out.is_floating_point() and not body.routed and not body.looked_up and body.op not in _KEPT:
            self.facts.leaf(out, self.node, made_by=call.name, inputs=inputs, definition=value)
        else:
            self.facts.set(out, value)

    def look(self, out: torch.Tensor) -> None:
        """Ask whether a tensor that the graph has a name for is the output of a layer."""
        value = self.facts.get(out)
        if value is None or not out.is_floating_point():
            return
        if value.body.op == "detached" and is_rows(value):
            self.cuts.append((self.node, ids_behind(value.body)))
        leaf = value.body.args[0] if value.body.op == "at" else None
        if isinstance(leaf, Leaf) and leaf.tensor is out:
            definition = leaf.definition
            if definition is None or leaf.layer is not None or definition.body.op not in ("add", "mul", "sum"):
                return
            value = definition
        layer = recognise(value)
        mixed = mixture(value) if layer is None and not value.body.routed else None
        if mixed is not None:
            self.mixtures[mixed.weights] = (self.node, mixed)
        if isinstance(layer, Refusal):
            self.refusals.append((self.node, layer, ids_behind(value.body)))
        elif layer is not None:
            self.found.append(Found(layer, out, self.node, tuple(size_of(axis) for axis in value.axes)))
            self.facts.leaf(out, self.node, layer=layer, definition=value)

    def _inputs(self, call: Call) -> list[Value]:
        found: list[Value] = []
        for argument in call.arguments.values():
            for item in argument if isinstance(argument, list | tuple) else (argument,):
                value = self.facts.get(item) if isinstance(item, torch.Tensor) else None
                if value is not None:
                    found.append(value)
        return found


JOINS = frozenset(("aten.amax", "aten.amin", "aten.prod"))
"""What joins a token's outputs to something else than their sum."""
_KEPT = frozenset(("at", "const", "cast"))


def _needs_mark(value: Value) -> bool:
    return value.body.routed and value.body.op not in ("delta", "detached", "const", "count", "seg", "start", "perm")


@dataclass
class ViewOf:
    """A call that made a view; `index` if it made several."""

    call: Call
    index: int | None

    def rerun(self, base: torch.Tensor) -> Value | None:
        result = RULES[self.call.name](self.call) if self.call.name in RULES else None
        if self.index is not None and isinstance(result, list | tuple):
            return result[self.index]
        return result if isinstance(result, Value) else None

    def write_back(self, base: Value, written: Value) -> Value | None:
        return None if self.index is not None else self.call.write_back(base, written)


def is_whole(value: Value, leaf: Leaf) -> bool:
    """Whether a fact says that a tensor is `leaf`, element by element."""
    positions = tuple(value.position(d) for d in range(len(value.axes)))
    return value.body is at(leaf, (), *positions) and shape_of(leaf.tensor) == tuple(map(size_of, value.axes))


class GraphRun(Interpreter):
    """Runs a Dynamo graph under a tracker, telling it the current node."""

    def __init__(self, module: GraphModule, tracker: Tracker, inside: Node | None = None) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.tracker = tracker
        self.inside = inside
        """The node of the outer graph, if this graph is the body of a function."""
        self.autocasts: list[Any] = []
        """The autocast regions that the graph is in."""

    def run_node(self, n: Node) -> Any:
        if self.inside is None:
            self.tracker.node = n
            self.tracker.node_has_gradients = torch.is_grad_enabled()
        if n.op == "call_function" and isinstance(n.target, torch._ops.HigherOrderOperator):
            return self.run_higher_order(n)
        written = len(self.tracker.writes)
        result = self.recorded(super().run_node(n), n)
        if n.target is torch.amp.autocast_mode._enter_autocast:
            self.autocasts.append(result)
        elif n.target is torch.amp.autocast_mode._exit_autocast:
            self.autocasts.pop()
        if self.inside is None:
            self.call_by_node(result, n)
            self.look(result, n, {storage for _, storage in self.tracker.writes[written:]})
        return result

    def call_by_node(self, result: Any, node: Node) -> None:
        """Tensors are called by the nodes that stand for them: `ids`, not the `topk` that `ids` is taken from."""
        if not isinstance(result, torch.Tensor):
            return
        value = self.tracker.facts.get(result)
        if value is None:
            value = self.tracker.facts.leaf(result, node)
        value = self.tracker.said[node] = self.named(result, value, node)
        leaf = value.body.args[0] if value.body.op == "at" else None
        if not isinstance(leaf, Leaf):
            return
        if leaf.tensor is result and leaf.node in node.all_input_nodes:
            leaf.node = node
        elif self.unwraps(node) and is_whole(value, leaf) and not any(leaf.tensor is t for t in self.env.values()):
            leaf.tensor, leaf.node = result, node

    def named(self, result: torch.Tensor, value: Value, node: Node) -> Value:
        """The fact about a node's result; a rounded one, as `rms_norm` ends with, is data: the rest has no name."""
        inner = value.body.args[0] if value.body.op == "cast" else None
        leaf = inner.args[0] if isinstance(inner, Term) and inner.op == "at" and not inner.routed else None
        if not isinstance(leaf, Leaf) or leaf.node is not node or leaf.tensor is result:
            return value
        return self.tracker.facts.leaf(result, node, made_by=leaf.made_by, inputs=leaf.inputs, definition=value)

    def unwraps(self, node: Node) -> bool:
        """Whether a node takes a plain tensor out of another kind of tensor: a distributed one's part on this rank."""
        return any(is_traceable_wrapper_subclass(self.env.get(a)) for a in node.all_input_nodes)

    def leave(self) -> None:
        """Leave the regions that a run which ended early has entered."""
        while self.autocasts:
            torch.amp.autocast_mode._exit_autocast(self.autocasts.pop())

    def nested(self, body: GraphModule, arguments: Sequence[Any]) -> Any:
        """Run a function's body as part of the current node."""
        self.tracker.inside_function += 1
        try:
            return GraphRun(body, self.tracker, inside=self.tracker.node).run(*arguments)
        finally:
            self.tracker.inside_function -= 1

    def look(self, result: Any, node: Node, written: set[int]) -> None:
        tensors = [result, *(self.env.get(a) for a in node.all_input_nodes if written)]
        for tensor in {id(t): t for t in tensors if isinstance(t, torch.Tensor)}.values():
            if tensor is result or storage_of(tensor) in written:
                self.tracker.look(tensor)

    def recorded(self, result: Any, node: Node) -> Any:
        """The node's result with the graph's own symbols for sizes that are data, not this run's."""
        known = node.meta.get("example_value")
        if isinstance(result, torch.SymInt) and isinstance(known, torch.SymInt):
            self.tracker.facts.rename_scalar(result, known)
            return known
        if isinstance(result, torch.Tensor) and isinstance(known, torch.Tensor):
            return self.tracker.recorded(result, known)
        if isinstance(result, tuple | list) and isinstance(known, tuple | list) and len(result) == len(known):
            pairs = [
                self.tracker.recorded(r, k) if isinstance(r, torch.Tensor) and isinstance(k, torch.Tensor) else r
                for r, k in zip(result, known, strict=True)
            ]
            return type(result)(pairs) if type(result) in (tuple, list) else result
        return result

    def run_higher_order(self, node: Node) -> Any:
        """A user function that moves rows is read; other bodies are graphs of their own, their results given."""
        known = node.meta["example_value"]
        function = function_of(self, node)
        if function is None:
            return known
        results = self.recorded(outputs_of(self, function), node)
        reason = why_not_mirror(self, function) if self.tracker.gradients else None
        if reason is None:
            return results
        routed = [self.tracker.value(a) for a in function.arguments if isinstance(a, torch.Tensor)]
        if any(value.body.routed for value in routed):
            self.tracker.functions.append((node, reason))
            self.tracker.function_inputs[node] = tuple(routed)
        return known
