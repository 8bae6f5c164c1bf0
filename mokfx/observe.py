"""Run the pass on one graph, and tell what it did: as a value, to the log, to tlparse, to counters."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing, counters
from torch._logging._internal import trace_structured
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from mokfx.broken import find_broken
from mokfx.capture import proving
from mokfx.errors import MissError, MissWarning, describe_miss
from mokfx.ops import Call, unsupported_reason
from mokfx.page.picture import LayerPicture, Pictures, joined
from mokfx.page.take import pictures_of
from mokfx.passes.outcome import Miss
from mokfx.passes.reading import Reading
from mokfx.passes.rewrite import rewrite
from mokfx.places import place_of_frames
from mokfx.readable import readable
from mokfx.report import GraphBreak, GraphReport

log = logging.getLogger("mokfx.report")
graph_log = logging.getLogger("mokfx.graph")

_warned: set[str] = set()
"""What was warned of already. The registry of `warnings` does not last: Dynamo's own use of it empties it."""


def rewrite_and_report(
    gm: GraphModule, refused: Sequence[Miss] = (), *, with_code: bool = False
) -> GraphReport:
    """Rewrite `gm`, as captured by Dynamo, in place.

    Raises:
        Unproven: the graph was captured under assumptions (`mokfx.capture`) that do not hold. Dynamo takes
        it, and
            captures the graph anew without them.

    Args:
        gm: the graph; its nested graphs are rewritten too.
        refused: what was left alone already when the graph was captured.
        with_code: also keep the code of the graph before and after, and pictures of it.
    """
    before = readable(gm) if with_code or graph_log.isEnabledFor(logging.DEBUG) else ""
    nodes_before = _size(gm)
    # A model may be compiled during a call under `torch.utils.checkpoint`, whose hooks count what is saved.
    with _disable_saved_tensors_hooks_during_tracing(), proving(gm) as left:
        pictures: list[Pictures] = []
        watch = (lambda reading: pictures.append(_pictures_of(reading))) if with_code else None
        outcome = rewrite(gm, provider_check=_why_unsupported, watch=watch)
        left += outcome.misses
    for module in gm.modules():
        if isinstance(module, GraphModule):
            module.recompile()
    ended_by = graph_break_after(gm)
    broken = find_broken(gm, ended_by)
    misses = outcome.misses
    if broken is not None and broken.where not in {miss.where for miss in refused}:
        # The cause, in place of what the pass makes of the same line with half of a layer at hand.
        misses = (broken, *(miss for miss in misses if miss.where != broken.where))
    return GraphReport(
        matches=outcome.matches,
        misses=(*refused, *misses),
        before=before,
        after=readable(gm) if before else "",
        nodes_before=nodes_before,
        nodes_after=_size(gm),
        seconds=outcome.seconds,
        ended_by=ended_by,
        pictures=joined(pictures),
    )


def publish(report: GraphReport) -> None:
    """Send a report to the logger `mokfx.report` and to `torch._dynamo.utils.counters["mok"]`."""
    if report.matches or report.misses:
        log.info("%s", report)
        artifact("mok_match_report", lambda: str(report))
    else:
        log.debug("%s", report)
    if report.before:
        graph_log.debug("before:\n%s", report.before)
        graph_log.debug("after:\n%s", report.after)
    counters["mok"]["matched"] += len(report.matches)
    counters["mok"]["missed"] += len(report.misses)
    for miss in report.misses:
        counters["mok"][miss.reason] += 1


def artifact(name: str, text: Any) -> None:
    """Give tlparse (TORCH_TRACE) a text, which the function `text` makes only if a trace is being written."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def act_on_misses(misses: tuple[Miss, ...], on_miss: str) -> None:
    """Do what the option `mok.on_miss` says.

    Raises:
        MissError: it says "raise", and there is a miss.
    """
    if not misses or on_miss == "ignore":
        return
    if on_miss == "raise":
        raise MissError(misses)
    for text, where in {describe_miss(miss): miss.where for miss in misses}.items():
        if text in _warned:
            continue
        _warned.add(text)
        # As a warning of the user's own line, since that is where something can be done about it.
        file, _, line = where.rpartition(":")
        lineno = int(line) if line.isdigit() else 0
        warnings.warn_explicit(f"MoE layer left alone: {text}", MissWarning, file or "<unknown>", lineno)


def forget_warnings() -> None:
    """Warn again of misses that were warned of before."""
    _warned.clear()


def graph_break_after(gm: GraphModule) -> GraphBreak | None:
    """The graph break that Dynamo noted on the graph as the reason of its end."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    where, code = place_of_frames(reason.user_stack)
    return GraphBreak(gist(reason.reason), where, code)


def gist(reason: str) -> str:
    """The sentence that explains a graph break, out of Dynamo's text of many lines."""
    lines = [line.strip() for line in reason.splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return explained[0] if explained else lines[0]


def _pictures_of(reading: Reading) -> Pictures:
    """The pictures of a graph; of one that cannot be drawn, none: what was recognised is true without them."""
    try:
        return pictures_of(reading)
    except Exception as error:
        log.warning("mokfx could not draw a graph, whose report has no pictures", exc_info=error)
        return Pictures(tuple(LayerPicture() for _ in reading.layers))


def _why_unsupported(node: Node) -> str | None:
    """Why no provider can run the call of the op that `node` is; None if one can."""
    args: Any
    kwargs: Any
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["example_value"])
    return unsupported_reason(Call(*args, **kwargs))


def _size(gm: GraphModule) -> int:
    """Operations in the graph and its nested graphs."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    return sum(node.op not in ("placeholder", "output") for graph in graphs for node in graph.nodes)
