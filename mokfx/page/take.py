"""Take the pictures of one graph: each layer before and after, and what is around each near miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from mokfx.page.fold import fold, nearest
from mokfx.page.meaning import Words
from mokfx.page.picture import Drawing, LayerPicture, Pictures, Sizes, Step
from mokfx.page.stages import Flow, is_weight, stages_of
from mokfx.page.steps import ROUTER, Teller, op_of, shape_of
from mokfx.passes.layer import Layer
from mokfx.passes.outcome import Match, Miss
from mokfx.passes.reading import Reading
from mokfx.passes.region import Region
from mokfx.readable import short_name

BEHIND, AHEAD = 28, 8
"""How many steps the picture of a near miss has, before and after the one where understanding ended."""
OUTPUT = "the layer's output: the MoE of x"


def pictures_of(reading: Reading) -> Pictures:
    """The pictures of a graph that the pass has just read and rewritten."""
    camera = _Camera(reading)
    layers = [camera.layer(region, match) for region, match in reading.layers]
    return Pictures(tuple(layers), {miss: camera.around(miss) for miss in reading.misses})


class _Camera:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.flow = Flow(reading)
        self.taken: set[Node] = set()
        """Nodes of the layers that have their picture."""

    # -- one layer -------------------------------------------------------------------------------------------------

    def layer(self, region: Region, match: Match) -> LayerPicture:
        """A layer that was rewritten; layers are to be asked for in the order of the graph."""
        stages = stages_of(region, self.flow, self.taken)
        self.taken |= stages.keys()
        unseen = self._checks(stages.keys() - set(region.kept) - {region.found.node, *region.aliases})
        shown = {node: stage for node, stage in stages.items() if node not in unseen}
        given = {need for node in shown for need in self.flow.needs[node]} - shown.keys() - unseen
        users = {user for alias in region.aliases for user in self.flow.users[alias]} - stages.keys()
        stage_of = {
            **dict.fromkeys(filter(self._is_value, given), "input"),
            **shown,
            **dict.fromkeys(sorted(users, key=self._at)[:3], "outside"),
        }
        nodes = {node: stage_of[node] for node in sorted(stage_of, key=self._at)}
        filled = [alias for alias in region.aliases if self._at(alias) >= self._at(region.found.node)]
        said = dict.fromkeys((region.found.node, *filled), OUTPUT)
        words = Words([region.found.layer], self.reading.tracker.facts)
        steps = Teller(self.reading, self.flow, words, region, said).steps(nodes)
        marked = [replace(step, kept=node in set(region.kept)) for node, step in zip(nodes, steps, strict=True)]
        before = Drawing(fold(marked), len(unseen))
        after = self._after(match, dict(zip(nodes, steps, strict=True)), set(region.erased))
        return LayerPicture(before, after, sizes_of(region.found.layer))

    def _checks(self, nodes: set[Node]) -> set[Node]:
        """Those that lead to nothing: assertions on sizes and what is computed for them."""
        idle: set[Node] = set()
        for node in sorted(nodes, key=self._at, reverse=True):
            if self.flow.users[node] <= idle:
                idle.add(node)
        return idle

    def _after(self, match: Match, before: dict[Node, Step], erased: set[Node]) -> Drawing:
        """What is left of the layer's picture, and the call in place of the rest."""
        graph = self.reading.module.graph
        call = next(node for node in graph.nodes if node.name == match.node)
        made = self._made_for(call)
        results = {user for node in made if call in node.all_input_nodes for user in node.users}
        absorbed = {node for node in made if node is not call and all(map(is_weight, _sources(node)))}
        wanted = (before.keys() - erased) | made | results | set(call.users)
        shown = [node for node in graph.nodes if node in wanted - absorbed and not is_weight(node)]
        position = {node: i for i, node in enumerate(shown)}
        steps = []
        for node in shown:
            needs = node.all_input_nodes
            weights = [weight for need in needs for weight in (_sources(need) if need in absorbed else [need])]
            new = Step(short_name(node.name), op_of(node), "outside" if call in needs else "input", quiet=True)
            if node is call:
                meaning = f"{match.erased} nodes in one call, forward and backward"
                new = Step(node.name, "mok.moe", "op", meaning=meaning, where=match.where, code=match.code)
            step = replace(
                before.get(node, new),
                shape=shape_of(node.meta.get("example_value")),
                inputs=tuple(position[need] for need in needs if need in position),
                weights=tuple(dict.fromkeys(short_name(weight.name) for weight in weights if is_weight(weight))),
            )
            steps.append(step)
        return Drawing(fold(steps))

    def _made_for(self, call: Node) -> set[Node]:
        """The call, and the nodes around it that the captured graph had not."""
        made = {call}
        todo = [*call.all_input_nodes, *call.users]
        while todo:
            node = todo.pop()
            if node not in self.flow.needs and node not in made and node.op != "output":
                made.add(node)
                todo.extend(node.all_input_nodes)
        return made

    # -- a near miss -----------------------------------------------------------------------------------------------

    def around(self, miss: Miss) -> Drawing:
        """The nodes that lead to the one where understanding ended, and the next ones that it keeps from being read."""
        end = next((node for node in self.flow.needs if node.name == miss.node), None)
        if end is None:
            return Drawing()
        tracker = self.reading.tracker
        matched = {leaf for region, _ in self.reading.layers for leaf in region.found.layer.ids.leaves}
        unmatched = (found.layer for found in tracker.found if matched.isdisjoint(found.layer.ids.leaves))
        others = set(self.flow.needs) - self.taken
        behind = set(filter(self._is_value, self.flow.before([end], others)))
        ahead = set(filter(self._is_value, self.flow.after([end], others)))
        nodes = {n: "unknown" if n in ahead else "known" for n in sorted({*behind, *ahead, end}, key=self._at)}
        nodes[end] = "ended"
        teller = Teller(self.reading, self.flow, Words(unmatched, tracker.facts))
        teller.said |= {node: text for node in self._scored(behind) if (text := teller.named(node, ROUTER))}
        steps = fold([_unread(step) for step in teller.steps(nodes)], chains=False)
        center = next(i for i, step in enumerate(steps) if step.stage == "ended")
        return Drawing(nearest(steps, center, BEHIND, AHEAD))

    def _scored(self, nodes: set[Node]) -> set[Node]:
        """The choices of experts, and what leads to them from the product that scores the experts."""
        found: set[Node] = set()
        todo = [node for node in nodes if not {"aten.topk", "aten.argmax"}.isdisjoint(self.flow.calls.get(node, ()))]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo.extend(() if self.flow.multiplies(node) else self.flow.needs[node])
        return found

    # --------------------------------------------------------------------------------------------------------------

    def _is_value(self, node: Node) -> bool:
        """Whether a node computes something of the layer: no weight, no size of an input, not the graph's output."""
        number = node.op == "placeholder" and isinstance(self.reading.values.get(node), torch.SymInt)
        return not is_weight(node) and not number and node.op != "output"

    def _at(self, node: Node) -> int:
        return self.flow.order[node]


def _unread(step: Step) -> Step:
    """What follows the end of understanding has no meaning that could be told."""
    return replace(step, meaning="") if step.stage == "unknown" else step


def _sources(node: Node) -> Sequence[Node]:
    """The inputs of the graph that a node is made from."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    todo = [node]
    while todo:
        other = todo.pop(0)
        if other in seen:
            continue
        seen.add(other)
        if not other.all_input_nodes:
            found[other] = None
        todo.extend(other.all_input_nodes)
    return list(found)


def sizes_of(layer: Layer) -> Sizes | None:
    """The layer's numbers in the call that was traced; None if one but the number of tokens depends on data."""
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
