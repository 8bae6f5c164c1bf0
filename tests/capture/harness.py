"""A recording backend, and a stand-in for a pass that absorbs every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from mokfx.capture import Capture, proving, substitutions
from mokfx.capture.markers import MARKERS

Pass = Callable[[GraphModule], None]


def nothing(gm: GraphModule) -> None:
    """A pass that finds no layer."""


def absorb(gm: GraphModule) -> None:
    """Stands for a pass that understood all of the graph: one op of the inputs takes the place of
    everything."""
    output = gm.graph.output_node()
    inputs = [
        n
        for n in gm.graph.nodes
        if n.op == "placeholder" and isinstance(n.meta["example_value"], torch.Tensor)
    ]
    with gm.graph.inserting_before(output):
        new = gm.graph.call_function(torch.clone, (inputs[0],))
    output.args = ((new,),)
    for node in reversed(list(gm.graph.nodes)):
        if node.op in ("call_function", "call_method") and node is not new:
            gm.graph.erase_node(node)


def drop_markers(gm: GraphModule) -> None:
    """A wrong pass: it removes what asserts the assumptions and leaves what depends on them."""
    for node in list(gm.graph.nodes):
        if node.target in MARKERS:
            gm.graph.erase_node(node)


@dataclass
class Compiled:
    """A function compiled in a scope of substitutions, with the graphs that its backend was given."""

    function: Callable[..., Any]
    run_pass: Pass | None = None
    """None: the backend proves nothing, so that the captured graph itself can be run."""
    fullgraph: bool = True
    dynamic: bool | None = None
    session: Capture = field(default_factory=Capture)
    graphs: list[GraphModule] = field(default_factory=list)
    tries: int = 0

    def __post_init__(self) -> None:
        self.compiled = torch.compile(
            self.function, backend=self.backend, fullgraph=self.fullgraph, dynamic=self.dynamic
        )

    def backend(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.tries += 1
        if self.run_pass is not None:
            with proving(gm):
                self.run_pass(gm)
        self.graphs.append(gm)
        gm.recompile()
        return gm.forward

    def __call__(self, *args: Any) -> Any:
        with (
            substitutions(self.session),
            torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
        ):
            return self.compiled(*args)

    def nodes(self, *targets: Any) -> list[Node]:
        """The nodes of all graphs that call one of these functions or methods."""
        return [n for gm in self.graphs for n in gm.graph.nodes if n.target in targets]

    @property
    def markers(self) -> list[str]:
        return [f"{node.target._schema.name} {node.args[-1]}" for node in self.nodes(*MARKERS)]

    @property
    def reasons(self) -> list[str]:
        return [f"{miss.where}: {miss.reason}" for miss in self.session.misses]
