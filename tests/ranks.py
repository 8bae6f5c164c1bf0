"""Run a function on several ranks: one process each, joined in a gloo group, with a deadline on everything.

    def check(rank: int, size: int) -> float:           # a module-level function: children import it by name
        group_name = dist.group.WORLD.group_name
        ...
        return value                                    # anything torch.save takes; tensors are fine

    values = run_ranks(4, check, 16)                    # [rank 0's value, rank 1's, ...]

The process group is initialised before `fn(rank, *args)` and destroyed after it. An exception on any
rank is raised here as `RankError` with that rank's traceback; a rank that hangs or dies is reported the same
way, and no child outlives the call. A start costs some tenths of a second for each rank (the first call of a
test process some seconds more, for importing torch once): do many checks in one call all the same.

Children come from a fork server that has imported torch. A child gets this process's environment variables as
they are at the call, but those that torch reads when it is imported (TORCH_LOGS) are those of the first call.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed"])


class RankError(RuntimeError):
    """At least one rank raised, died or did not finish; the message names each and quotes its traceback."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `fn(rank, *args)` on `world_size` gloo ranks and return their results in rank order.

    Args:
        world_size: how many ranks.
        fn: a module-level function of an importable module.
        args: picklable; every rank gets its own copy.
        timeout: seconds for the whole call, and for each collective in it.

    Raises:
        RankError: a rank raised, was killed, or did not finish within `timeout`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = [
            _context.Process(
                target=_run_one,
                args=(rank, world_size, folder, timeout, dict(os.environ), fn, args),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            finished = _wait(processes, Path(folder), time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        failures = [_failure(rank, finished[rank], Path(folder)) for rank in range(world_size)]
        if any(failures):
            raise RankError("\n".join(failure for failure in failures if failure))
        return [torch.load(_result(Path(folder), rank), weights_only=False) for rank in range(world_size)]


def _wait(processes: list[Any], folder: Path, deadline: float) -> list[int | None]:
    """Exit codes when all ranks ended or one failed; None for a rank that still runs."""
    while time.monotonic() < deadline:
        codes: list[int | None] = [process.exitcode for process in processes]
        if None not in codes:
            break
        if any(codes):
            # The others are now stuck in a collective, or fail because this peer left: give them a moment to
            # report, since the first to exit is not always the first to fail.
            time.sleep(0.5)
            break
        time.sleep(0.01)
    return [process.exitcode for process in processes]


def _failure(rank: int, code: int | None, folder: Path) -> str:
    """What went wrong on `rank`, or "" if nothing did."""
    report = folder / f"{rank}.error"
    if report.exists():
        return f"rank {rank} raised:\n{report.read_text()}"
    if code is None:
        return f"rank {rank} did not finish (time-out, or another rank failed first)"
    if code != 0 or not _result(folder, rank).exists():
        return f"rank {rank} died with exit code {code}"
    return ""


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.result"


def _run_one(
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    environment: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The body of one rank's process."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        store = FileStore(str(Path(folder) / "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        value = fn(rank, *args)
        torch.save(value, Path(folder) / f"{rank}.partial")
        os.replace(Path(folder) / f"{rank}.partial", _result(Path(folder), rank))
        dist.barrier()  # a rank that leaves early would break a slower peer's last collective
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
