"""Take the pictures of one graph: each layer before and after, and what is around each near miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mokfx.page.fold import fold
from mokfx.page.meaning import Words
from mokfx.page.picture import Drawing, LayerPicture, Pictures, Sizes, Step
from mokfx.page.stages import Flow, is_weight, stages_of
from mokfx.passes.layer import Layer
from mokfx.passes.outcome import Match, Miss
from mokfx.passes.reading import Reading
from mokfx.passes.region import Region
from mokfx.places import place_of_node
from mokfx.readable import short_name

AROUND = 48
"""How many nodes the picture of a near miss has at most, before equal ones are folded."""
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
    "aten.topk": "the best experts of each token, and their weights",
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


def pictures_of(reading: Reading) -> Pictures:
    """The pictures of a graph that the pass has just read and rewritten."""
    camera = _Camera(reading)
    layers: list[LayerPicture] = []
    for region, match in reading.layers:
        layers.append(camera.layer(region, match))
    return Pictures(tuple(layers), {miss: camera.around(miss) for miss in reading.misses})


class _Camera:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.flow = Flow(reading)
        self.taken: set[Node] = set()
        """Nodes of the layers that have their picture."""
        self.replaced = {node for region, _ in reading.layers for node in region.erased}

    # -- one layer -------------------------------------------------------------------------------------------------

    def layer(self, region: Region, match: Match) -> LayerPicture:
        layer = region.found.layer
        words = Words([layer], self.reading.tracker.facts)
        stages = stages_of(region, self.flow, self.taken)
        self.taken |= stages.keys()
        kept = set(region.kept)
        unseen = self._checks(stages.keys() - kept - {region.found.node, *region.aliases})
        shown = {n: stage for n, stage in stages.items() if n not in unseen}
        given = {need for node in shown for need in self.flow.needs[node]} - shown.keys() - unseen
        users = {user for alias in region.aliases for user in self.flow.users[alias]} - stages.keys()
        outside = sorted(users, key=self._at)[:3]
        nodes = {
            **{n: "input" for n in sorted(given, key=self._at) if self._is_input(n)},
            **shown,
            **dict.fromkeys(outside, "outside"),
        }
        said = dict.fromkeys((region.found.node, *region.aliases), "the layer's output: the MoE of x")
        steps = [self.step(n, stage, nodes, words, layer, region, said) for n, stage in nodes.items()]
        marked = [_marked(step, "kept" if n in kept else "") for n, step in zip(nodes, steps, strict=True)]
        before = Drawing(fold(marked), len(unseen))
        return LayerPicture(before, self.after(match, nodes, steps), _sizes(layer))

    def _checks(self, nodes: set[Node]) -> set[Node]:
        """Those that lead to nothing: assertions on sizes and what is computed for them."""
        idle: set[Node] = set()
        for node in sorted(nodes, key=self._at, reverse=True):
            if self.flow.users[node] <= idle:
                idle.add(node)
        return idle

    def after(self, match: Match, before: dict[Node, str], steps: Sequence[Step]) -> Drawing:
        """What is left of the layer's picture, and the call in place of the rest."""
        graph = self.reading.module.graph
        call = next(node for node in graph.nodes if node.name == match.node)
        known = dict(zip(before, steps, strict=True))
        made = _closure_of_new(call, self.flow.needs)
        results = {user for node in made if call in node.all_input_nodes for user in node.users}
        absorbed = {n for n in made if n is not call and _behind(n) and all(map(is_weight, _behind(n)))}
        shown = [
            n
            for n in graph.nodes
            if not is_weight(n)
            and n not in absorbed
            and ((n in known and n not in self.replaced) or n in made or call in n.all_input_nodes or n in results)
        ]
        position = {n: i for i, n in enumerate(shown)}
        drawn = []
        for node in shown:
            inputs = tuple(position[need] for need in node.all_input_nodes if need in position)
            parameters = [
                weight for need in node.all_input_nodes for weight in (_behind(need) if need in absorbed else [need])
            ]
            weights = tuple(dict.fromkeys(short_name(need.name) for need in parameters if is_weight(need)))
            old = known.get(node)
            where, code = (old.where, old.code) if old is not None else (match.where, match.code)
            drawn.append(
                Step(
                    name=short_name(node.name),
                    op="mok.moe" if node is call else _op(node),
                    stage="op" if node is call else old.stage if old is not None else _stage_of_new(node, call),
                    shape=_shape(node.meta.get("example_value")),
                    meaning=f"{match.erased} nodes in one call, forward and backward"
                    if node is call
                    else old.meaning
                    if old is not None
                    else "",
                    where=where,
                    code=code,
                    inputs=inputs,
                    weights=weights,
                    quiet=node is not call and (old.quiet if old is not None else True),
                )
            )
        return Drawing(fold(drawn))

    # -- a near miss -----------------------------------------------------------------------------------------------

    def around(self, miss: Miss) -> Drawing:
        """The nodes that lead to the one where understanding ended, and the next ones that it keeps from being read."""
        end = next((node for node in self.flow.needs if node.name == miss.node), None)
        if end is None:
            return Drawing(())
        tracker = self.reading.tracker
        words = Words((found.layer for found in tracker.found if found.node not in self.replaced), tracker.facts)
        ahead = {n for n in self._nearest(end, self.flow.users, AROUND // 4) if n is not end}
        behind = self._nearest(end, self.flow.needs, AROUND)
        nodes = {n: "known" if n in behind else "unknown" for n in sorted(behind | ahead, key=self._at)}
        choices = {n for n in behind if {"aten.topk", "aten.argmax"} & self.flow.calls.get(n, set())}
        said = {n: text for n in self._scored(choices) if (text := self._named(n, ROUTER))}
        steps = [
            _marked(
                self.step(n, stage, nodes, words, words.layer, None, said),
                "ended" if n is end else "after" if stage == "unknown" else "",
            )
            for n, stage in nodes.items()
        ]
        return Drawing(fold(steps))

    def _nearest(self, start: Node, edges: Any, limit: int) -> set[Node]:
        """The nodes closest to one along `edges`: values of the layer, not weights and numbers."""
        found = {start: 0}
        todo = [start]
        while todo and len(found) < limit:
            node = todo.pop(0)
            for other in sorted(edges[node], key=self._at, reverse=True):
                if other not in found and other.op != "output" and self._is_input(other) and len(found) < limit:
                    found[other] = found[node] + 1
                    todo.append(other)
        return set(found)

    # -- one node --------------------------------------------------------------------------------------------------

    def step(
        self,
        node: Node,
        stage: str,
        nodes: dict[Node, str],
        words: Words,
        layer: Layer | None,
        region: Region | None,
        said: dict[Node, str],
    ) -> Step:
        position = {n: i for i, n in enumerate(nodes)}
        where, code = place_of_node(node)
        needs = sorted(self.flow.needs[node], key=self._at)
        operand = "" if region is None or layer is None else _operand(node, layer, region)
        meaning = said.get(node) or operand or self._meaning(node, stage, words, layer, region)
        return Step(
            name=short_name(node.name),
            op="" if node.op == "placeholder" else _op(node),
            stage=stage,
            shape=_shape(self.reading.values.get(node)),
            meaning=meaning,
            where=where,
            code=code,
            inputs=tuple(position[need] for need in needs if need in position),
            weights=tuple(short_name(need.name) for need in needs if is_weight(need)),
            quiet=not operand and node not in said and (stage in ("input", "outside") or self._keeps_meaning(node)),
        )

    def _meaning(self, node: Node, stage: str, words: Words, layer: Layer | None, region: Region | None) -> str:
        value = self.reading.values.get(node)
        if isinstance(value, torch.SymInt):
            return words.of_index(self.reading.tracker.facts.scalar(value))
        if isinstance(value, tuple | list):
            names = self.flow.calls.get(node, set())
            return ROUTER["aten.topk"] if "aten.topk" in names else ""
        if stage == "shared" and self.flow.multiplies(node) and region is not None and layer is not None:
            return _shared_product(node, layer, region, self.flow)
        named = self._named(node, {"router": ROUTER, "shared": SHARED}.get(stage, {}))
        if named:
            return named
        fact = self.reading.tracker.said.get(node)
        if fact is None or not isinstance(value, torch.Tensor):
            return ""
        return words.of(fact, value.is_floating_point())

    def _named(self, node: Node, table: dict[str, str]) -> str:
        """What a table says of the first ATen op in it that a node makes."""
        calls = self.flow.calls.get(node, set())
        return next((text for name, text in table.items() if name in calls), "")

    def _scored(self, choices: set[Node]) -> set[Node]:
        """The choices of experts, and what leads to them from the product that scores the experts."""
        found: set[Node] = set()
        todo = list(choices)
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo.extend(() if self.flow.multiplies(node) else self.flow.needs[node])
        return found

    def _keeps_meaning(self, node: Node) -> bool:
        """Whether a node only changes the form of what it is given, or takes a number out of it."""
        value = self.reading.values.get(node)
        number = isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and value.dim() == 0)
        if number or _op(node) in FORM:
            return True
        values = [self.reading.values.get(need) for need in self.flow.needs[node]]
        return _op(node) == "getitem" and len(values) == 1 and isinstance(values[0], tuple | list)

    def _is_input(self, node: Node) -> bool:
        value = self.reading.values.get(node)
        sized = node.op == "placeholder" and isinstance(value, torch.SymInt)
        return not is_weight(node) and not sized

    def _at(self, node: Node) -> int:
        return self.flow.order[node]


def _operand(node: Node, layer: Layer, region: Region) -> str:
    """What a node is to the layer, if the op reads it."""
    roles = ((layer.x, "x: the tokens"), (layer.ids, "the experts of each token"), (layer.weights, "router weights"))
    for operand, text in roles:
        if operand is not None and any(region.operands[leaf] is node for leaf in operand.leaves):
            return text
    return ""


def _shared_product(node: Node, layer: Layer, region: Region, flow: Flow) -> str:
    behind = flow.needs[node] | {n for need in flow.needs[node] for n in flow.needs.get(need, ())}
    for name in ("gate", "up", "down"):
        matrix = getattr(layer.shared, name, None)
        if matrix is not None and any(region.operands[leaf] in behind for leaf in matrix.operand.leaves):
            fused = name == "gate" and layer.shared is not None and layer.shared.up is None
            return f"shared expert: {'gate and up projections' if fused else f'{name} projection'}"
    return "gate of the shared expert"


def _closure_of_new(call: Node, captured: Any) -> set[Node]:
    """The call, and the nodes that were made for it."""
    made = {call}
    todo = [*call.all_input_nodes, *call.users]
    while todo:
        node = todo.pop()
        if node not in captured and node not in made and node.op != "output":
            made.add(node)
            todo.extend(node.all_input_nodes)
    return made


def _behind(node: Node) -> list[Node]:
    """The inputs of the graph that a node is made from."""
    found: dict[Node, None] = {}
    todo = [node]
    while todo:
        other = todo.pop(0)
        if not other.all_input_nodes:
            found[other] = None
        todo.extend(other.all_input_nodes)
    return [] if node in found else list(found)


def _stage_of_new(node: Node, call: Node) -> str:
    return "outside" if call in node.all_input_nodes else "input"


def _sizes(layer: Layer) -> Sizes | None:
    x = layer.x.leaves[0].tensor
    shape = [_number(size) for size in x.shape]
    tokens = 1
    for size in shape[:-1]:
        tokens = tokens * size if size is not None and tokens is not None else None  # type: ignore[assignment]
    numbers = [_number(n) for n in (layer.hidden, layer.intermediate, layer.num_experts, layer.top_k)]
    if any(number is None for number in numbers):
        return None
    hidden, intermediate, experts, top_k = (int(number or 0) for number in numbers)
    width = None if layer.shared is None else layer.shared.down.inputs
    shared = _number(width.args[1]) if width is not None and width.op == "var" else int(layer.shared is not None)
    return Sizes(
        tokens=tokens,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        ranks=layer.ranks,
        dtype=str(layer.x.dtype).removeprefix("torch."),
        gated=layer.network.gate is not None,
        shared=shared or 0,
        symbolic=any(isinstance(size, torch.SymInt) for size in x.shape),
    )


def _number(size: Any) -> int | None:
    """A size as it was in the call that was traced; None if it depends on data."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return None if hint is None else int(hint)
    return int(size) if isinstance(size, int) or getattr(size, "is_Integer", False) else None


def _op(node: Node) -> str:
    if node.op in ("placeholder", "get_attr", "output"):
        return "return" if node.op == "output" else ""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.split(".")[0]


def _shape(value: Any) -> str:
    """`bf16[16, 2048]`; a list's length; "" of other things."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{DTYPES.get(dtype, dtype)}[{', '.join(map(_size, value.shape))}]"
    if isinstance(value, torch.SymInt):
        return "a number"
    return f"{len(value)} values" if isinstance(value, tuple | list) and len(value) > 1 else ""


def _size(size: int | torch.SymInt) -> str:
    """A dimension; "rows" where it is a number of rows that routing decides."""
    return "rows" if isinstance(size, torch.SymInt) and free_unbacked_symbols(size) else str(size)


def _marked(step: Step, mark: str) -> Step:
    return replace(step, mark=mark) if mark else step
