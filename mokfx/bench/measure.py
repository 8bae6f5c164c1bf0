"""Timing on the GPU: calls back to back between two events, the median of several such."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from .variants import Run


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median, and the fastest and slowest of the measured groups."""

    median: float
    low: float
    high: float


def time_calls(run: Run, calls: int = 10, groups: int = 20, warmup: int = 3) -> Timing:
    """Times `groups` groups of `calls` calls each, without a sync inside a group."""
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(groups):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return Timing(statistics.median(times), min(times), max(times))
