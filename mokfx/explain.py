"""`mokfx.explain`: trace a model once, and say what the backend makes of each graph."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch._dynamo
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend, innermost_fn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from mokfx.capture import Capture
from mokfx.capture.markers import MARKERS
from mokfx.compile import CapturingBackend, capture_sizes, capturing
from mokfx.observe import gist, rewrite_and_report
from mokfx.report import GraphBreak, GraphReport, Report
from mokfx.undisturbed import undisturbed_dynamo, undisturbed_state


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Call `model(*args, **kwargs)` once under Dynamo, and report what the backend `mok` would do.

    The graphs run as captured, uncompiled and not rewritten. Grad mode, autocast and `model.training` are
    those of the caller and count: they are part of what is captured. Afterwards a module's buffers and
    attributes, the random generators and Dynamo's caches are as before; the arguments are what the model
    left of them. In a process group every rank has to call this, as with the model itself.

    Args:
        model: a module or a function. One that has been compiled is explained the way it was compiled: with
        sizes
            that depend on data captured if that was by `mokfx.compile` or `fullgraph=True`, and broken at
            them otherwise.
        args, kwargs: its inputs.

    Raises:
        Whatever the model raises.
    """
    plain = model._orig_mod if isinstance(model, OptimizedModule) else innermost_fn(model)
    recorder = _Recorder()
    options = {"isolate_recompiles": True} if "isolate_recompiles" in _optimize_parameters() else {}
    with (
        undisturbed_state(plain),
        undisturbed_dynamo(recorder),
        _capture_like(model, recorder.session),
    ):
        breaks_before = dict(counters["graph_break"])
        optimize = torch._dynamo.optimize(backend=cast(Any, recorder), **options)
        optimize(plain)(*args, **kwargs)
        reasons = [
            reason for reason, n in counters["graph_break"].items() if n > breaks_before.get(reason, 0)
        ]
    return Report(tuple(recorder.reports), _unplaced(reasons, recorder.reports))


class _Recorder:
    """A backend that keeps a report of each graph, and runs the graph as it was."""

    __name__ = "mokfx.explain"

    def __init__(self) -> None:
        self.reports: list[GraphReport] = []
        self.session = Capture()
        self._told = 0

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        captured = copy.deepcopy(gm)
        refused = self.session.misses[self._told :]
        self.reports.append(rewrite_and_report(gm, refused, with_code=True))
        self._told += len(refused)
        # Where an assumption of the capture is in the graph, only the rewritten graph runs with any input.
        assumes = any(node.target in MARKERS for node in captured.graph.nodes)
        return gm.forward if assumes else captured.forward


def _capture_like(model: Any, session: Capture) -> contextlib.AbstractContextManager[None]:
    """The context in which a graph is captured as it was when `model` was compiled."""
    if isinstance(model, OptimizedModule):
        context = model.dynamo_ctx
        if callable(context.callback) and isinstance(innermost_backend(context.callback), CapturingBackend):
            return capturing(session)
        if context.fullgraph:
            return capture_sizes()
    elif getattr(model, "_mokfx_captures", False):
        return capturing(session)
    return contextlib.nullcontext()


def _optimize_parameters() -> Any:
    return inspect.signature(torch._dynamo.eval_frame._optimize).parameters


def _unplaced(reasons: list[str], reports: list[GraphReport]) -> tuple[GraphBreak, ...]:
    """The breaks that Dynamo counted but noted on no graph: there was nothing to put into one before them."""
    placed = {report.ended_by.reason for report in reports if report.ended_by is not None}
    return tuple(
        GraphBreak(reason, "") for reason in dict.fromkeys(map(gist, reasons)) if reason not in placed
    )
