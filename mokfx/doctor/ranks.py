"""Whether ranks can exchange: the process group, and symmetric memory between GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from mokfx.doctor.finding import Finding
from mokfx.doctor.symmetric import Told, every_rank

TORCHRUN = "torchrun --no-python --nproc-per-node <N> mokfx doctor"
WAIT = 180.0
"""Seconds for a start of a process for each GPU, and what they do."""


def ranks() -> Iterator[Finding]:
    """The ranks of this process group; without one, a process for each local GPU is started."""
    if not dist.is_available():
        yield Finding("torch.distributed", "not built into this torch", "missing", "install a torch that has it")
        return
    if dist.is_initialized():
        yield Finding("ranks", f"{dist.get_world_size()}, of backend {dist.get_backend()}")
        yield from _findings(every_rank())
        return
    count = torch.cuda.device_count()
    if count > 1:
        yield Finding("ranks", f"one started for each of {count} GPUs; others: {TORCHRUN}")
        yield from _findings(_started(count))
        return
    gloo = "and gloo for CPUs" if dist.is_gloo_available() else "and no gloo"
    yield Finding("ranks", f"one process, {gloo}; to look at several: {TORCHRUN}", "note")


def _started(count: int) -> list[Told]:
    """What ranks of their own tell, one process each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    run = subprocess.run(
        [*command, "-m", "mokfx.doctor.symmetric"],
        capture_output=True,
        text=True,
        timeout=WAIT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if run.returncode != 0:
        lines = [line for line in run.stderr.splitlines() if "Error" in line] or ["no word from them"]
        return [(False, lines[0].strip())]
    return [(good, said) for good, said in json.loads(run.stdout.splitlines()[-1])]


def _findings(every: list[Told]) -> Iterator[Finding]:
    """What the first rank found, if all are well; else what each has that is not."""
    remedy = "ranks need a GPU each, of one host, with peer access; a container may need --ipc=host"
    bad = [(rank, said) for rank, (good, said) in enumerate(every) if not good]
    for rank, said in bad:
        yield Finding("symmetric memory", f"rank {rank}: {said}", "missing", remedy)
    if not bad:
        yield Finding("symmetric memory", every[0][1])
