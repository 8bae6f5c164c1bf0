"""The graph that plain Dynamo makes of a layer: one graph, data may decide sizes, nothing is run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule


class _Captured(Exception):
    """Stops Dynamo once the graph is there, so that nothing runs."""


def capture(layer: nn.Module, *args: Any, dynamic: bool | None = None) -> GraphModule:
    """The one Dynamo graph of `layer(*args)`.

    Raises:
        Exception: whatever Dynamo raises where it cannot make one graph.
    """
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        raise _Captured

    torch._dynamo.reset()
    flags: dict[str, Any] = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    try:
        with torch._dynamo.config.patch(**flags):
            torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    except Exception:
        if not graphs:
            raise
    return graphs[0]
