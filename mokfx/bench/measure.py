"""Timing: calls back to back, the median of several groups of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .ranks import Ranks


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median, and the fastest and slowest of the measured groups."""

    median: float
    fastest: float
    slowest: float


def time_calls(
    run: Callable[[], object], ranks: Ranks, calls: int = 10, groups: int = 20, warmup: int = 3
) -> Timing:
    """Times `groups` groups of `calls` calls each, without a sync inside a group.

    With several ranks all begin a group together, and a group took as long as on the slowest.
    """
    for _ in range(warmup):
        run()
    times = []
    for _ in range(groups):
        ranks.wait()
        times.append(_time_group(run, calls, on_gpu=ranks.device.type == "cuda") / calls)
    slowest = [max(group) for group in zip(*ranks.share(times), strict=True)]
    return Timing(statistics.median(slowest), min(slowest), max(slowest))


def _time_group(run: Callable[[], object], calls: int, on_gpu: bool) -> float:
    if not on_gpu:
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
