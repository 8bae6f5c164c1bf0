"""Run a row: one graph, one `mok.moe` a layer, outputs and every gradient beside the package's own eager code."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

import mokfx
from mokfx.observe import gist
from mokfx.report import GraphBreak, GraphReport, Report

from ..ranks import run_ranks
from .row import Case, Row, Verdict

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest distance from eager, as a part of the norm of what eager gives."""


def check_row(row: Row) -> Verdict:
    """Run a row in each of its dtypes, on as many ranks as it has, and say what became of it.

    Raises:
        AssertionError: a layer that was matched does not compute what eager does, or its dtypes or ranks differ in
            what became of them.
    """
    if row.ranks == 1:
        verdicts = verdicts_of(row)
    else:
        verdicts = [verdict for each in run_ranks(row.ranks, _on_rank, row) for verdict in each]
    same = {(verdict.matched, verdict.kept) for verdict in verdicts}  # a reason may call things by other names
    assert len(same) == 1, f"{row.name}: not the same everywhere: {verdicts}"
    return verdicts[0]


def _on_rank(rank: int, row: Row) -> list[Verdict]:
    return verdicts_of(row)


def verdicts_of(row: Row) -> list[Verdict]:
    """What becomes of a row on this rank, in each dtype."""
    verdicts = []
    for dtype in row.dtypes:
        case = row.build(dtype)
        report = compare(case, TOLERANCE[dtype], row.build(dtype))
        verdicts.append(verdict_of(report, case.moe_layers))
    return verdicts


def verdict_of(report: Report, moe_layers: int) -> Verdict:
    """Read a report: matched is one graph with a call of the op for each layer, and nothing left alone."""
    if report.misses:
        return Verdict(False, reason="; ".join(dict.fromkeys(miss.reason for miss in report.misses)))
    if report.graph_breaks:
        reasons = (f"`{each.code}`: {each.reason}" if each.code else each.reason for each in report.graph_breaks)
        return Verdict(False, reason="; ".join(dict.fromkeys(reasons)))
    matches = report.matches
    assert len(report.graphs) == 1, f"{len(report.graphs)} graphs without a graph break"
    if not matches:
        return Verdict(False, reason="nothing in it looks like an MoE layer")
    assert len(matches) == moe_layers, f"{len(matches)} of {moe_layers} layers, and no reason for the others"
    return Verdict(True, kept=tuple(dict.fromkeys(kept for match in matches for kept in match.kept)))


def compare(case: Case, tolerance: float, again: Case | None = None, **options: Any) -> Report:
    """Run a case compiled and in eager, forward and backward, and compare all that comes of it.

    The op is the reference provider's and the rest of the graph runs as it was captured, unless `options` (of
    `mokfx.compile`) say otherwise.

    Args:
        again: the same case, built once more; a copy of it if left out, which closures in a model may not stand.
    """
    again = again or copy.deepcopy(case)
    eager = results(case.model, case)
    torch._dynamo.reset()
    counters["graph_break"].clear()
    compiled = mokfx.compile(again.model, **{"options": {"mok.compiler": "eager"}, **options})
    with reports() as seen:
        got = results(compiled, again)
    assert_close(got, eager, tolerance)
    # Where Dynamo gives up a whole function there is no graph to put the reason on.
    breaks = tuple(GraphBreak(gist(reason), "") for reason in counters["graph_break"])
    return Report(tuple(seen), breaks if not any(each.ended_by for each in seen) else ())


@contextmanager
def reports() -> Iterator[list[GraphReport]]:
    """The report of each graph that is compiled meanwhile, taken from mokfx's log."""
    seen: list[GraphReport] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert isinstance(record.args, tuple)
            seen.extend(arg for arg in record.args if isinstance(arg, GraphReport))

    log, collect = logging.getLogger("mokfx.report"), Collect()
    level, propagate = log.level, log.propagate
    log.addHandler(collect)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield seen
    finally:
        log.removeHandler(collect)
        log.setLevel(level)
        log.propagate = propagate


def results(function: Any, case: Case) -> dict[str, Any]:
    """What a call gives: outputs, the gradient of each input and parameter, and what it leaves in buffers.

    Args:
        function: the case's model, or what was compiled of it.
    """
    args, kwargs = case.args, dict(case.kwargs)
    torch.manual_seed(0)  # a router may draw noise
    outputs = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if leaf is not None]
    loss_of(outputs).backward()
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return {
        **{f"output {i}": output for i, output in enumerate(outputs)},
        **{f"gradient of input {i}": tensor.grad for i, tensor in enumerate(inputs)},
        **{f"gradient of {name}": parameter.grad for name, parameter in case.model.named_parameters()},
        **{f"buffer {name}": buffer for name, buffer in case.model.named_buffers()},
    }


def loss_of(outputs: list[Any]) -> Tensor:
    """A sum in which every element of every output counts differently."""
    loss = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(output for output in outputs if isinstance(output, Tensor) and output.requires_grad):
        factors = torch.linspace(-1, 2 + i, y.numel(), dtype=torch.float64).view(y.shape)
        loss = loss + (y.double() * factors).sum()
    return loss


def assert_close(got: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float) -> None:
    """Each result apart; whole numbers are equal, and a gradient that only one of the two has is a failure.

    But an expert that nobody chose has no gradient in some eager code, and one of zeros from the op.
    """
    assert list(got) == list(wanted)
    for name, b in wanted.items():
        a = got[name]
        if b is None and isinstance(a, Tensor) and name.startswith("gradient"):
            assert not full(a).any(), f"{name}: compiled code has one, and eager has none"
            continue
        assert (a is None) == (b is None), f"{name}: {a} where eager has {b}"
        if not isinstance(b, Tensor):
            assert a == b, f"{name}: {a} where eager has {b}"
            continue
        a, b = full(a), full(b)
        assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: {a.dtype} {a.shape}, eager {b.dtype} {b.shape}"
        if not b.is_floating_point():
            assert torch.equal(a, b), f"{name}: {a} where eager has {b}"
            continue
        distance, norm = float((a.double() - b.double()).norm()), float(b.double().norm())
        assert distance <= tolerance * norm + 1e-12, f"{name}: {distance} from eager's, whose norm is {norm}"


def full(tensor: Tensor) -> Tensor:
    """The values of a tensor; of one spread over ranks, this rank's part."""
    to_local = getattr(tensor, "to_local", None)
    return (to_local() if to_local else tensor).detach()
