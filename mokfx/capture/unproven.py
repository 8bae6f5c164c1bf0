"""The request for another attempt without the assumptions that could not be proven."""

from __future__ import annotations

from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis

from mokfx.passes.outcome import Miss


class Unproven(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):
    """Raised inside a backend or while tracing: Dynamo traces the frame again, and the lines that could not be
    proven are left to it.

    Dynamo restarts a frame, before any of it has run, for a RestartAnalysis. It lets the second of these two
    pass through a backend, and forgets for the first what it speculated about the frame's calls."""

    def __init__(self, misses: list[Miss]) -> None:
        self.misses = misses
        super().__init__(restart_reason="; ".join(f"{m.where}: {m.reason}" for m in misses))
