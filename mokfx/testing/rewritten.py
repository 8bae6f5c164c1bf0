"""`assert_rewritten`: that a model's MoE layers become calls of the op, and what each was recognised as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.eval_frame import OptimizedModule

from mokfx.compile import compile
from mokfx.errors import MokError
from mokfx.explain import explain
from mokfx.report import Report
from mokfx.testing.normalise import normalised


def assert_rewritten(model: Callable[..., Any], *args: Any, expected: int | str | None = None, **kwargs: Any) -> Report:
    """Trace `model(*args, **kwargs)` once, and assert that its MoE layers are rewritten.

    Nothing is compiled, and the model is left as it was: see `mokfx.explain`. To pin a graph too, give
    `normalised(report.graph_after)` to expecttest.

    Args:
        model: a module or a function, compiled or not; one that is not is traced as by `mokfx.compile`.
        args, kwargs: its inputs.
        expected: None: at least one layer is rewritten, and nothing that looks like one is left alone. A number: so
            many are rewritten, and none is left alone. A text: the normalised report, whatever it says; if it is a
            literal in triple quotes, and the call is a statement of its own, EXPECTTEST_ACCEPT=1 writes it.

    Returns:
        The report.

    Raises:
        AssertionError: it is not so; the message has the report, or the difference of the texts.
        MokError: a text is expected, and expecttest is not installed.
    """
    compiled = isinstance(model, OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable")
    report = explain(model if compiled else compile(model), *args, **kwargs)
    if isinstance(expected, str):
        _expecttest()(normalised(report), expected, skip=1)
        return report
    wanted = "at least 1" if expected is None else str(expected)
    found = len(report.matches)
    if report.misses or (found == 0 if expected is None else found != expected):
        left = f" and {len(report.misses)} left alone" if report.misses else ""
        layers = f"{wanted} MoE layer" + ("" if wanted in ("1", "at least 1") else "s")
        raise AssertionError(f"expected {layers} to be rewritten and none left alone, found {found}{left}:\n\n{report}")
    return report


def _expecttest() -> Callable[..., None]:
    try:
        from expecttest import assert_expected_inline
    except ImportError:
        raise MokError("a text is expected, and expecttest is not installed: pip install expecttest") from None
    return assert_expected_inline
