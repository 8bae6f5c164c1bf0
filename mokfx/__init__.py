"""mokfx: Mixture-of-Experts layers of unmodified PyTorch models as one fused op, by `torch.compile`.

torch.compile(model, backend="mok")     compile; nothing has to be imported for it
mokfx.compile(model)                    the same, and sizes that depend on data do not break the graph
mokfx.explain(model, *inputs)           what was recognised, what was left alone and why
mokfx.check(model, *inputs)             outputs and every gradient beside eager and float64
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # Torch's parts that are imported here say so where NumPy is missing; nothing in mokfx needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

    from mokfx.check import CheckResult, check
    from mokfx.compile import compile
    from mokfx.errors import MissError, MissWarning, MokError, OptionError
    from mokfx.explain import explain
    from mokfx.passes.outcome import Match, Miss
    from mokfx.report import GraphReport, Report

__all__ = [
    "CheckResult",
    "GraphReport",
    "Match",
    "Miss",
    "MissError",
    "MissWarning",
    "MokError",
    "OptionError",
    "Report",
    "check",
    "compile",
    "explain",
]
