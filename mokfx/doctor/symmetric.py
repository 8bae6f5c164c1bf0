"""Symmetric memory between the ranks of the default group: each rank reads what every other wrote.

`python -m mokfx.doctor.symmetric`, under torchrun, prints what each rank found, as JSON.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SIZE = 2**25
"""Numbers of 4 bytes that are exchanged: 128 MiB, enough for a speed."""


PATIENCE = 60_000
"""Milliseconds to wait for a rank that may have failed."""

Told = tuple[bool, str]
"""Whether a rank is well, and what it says."""


def every_rank() -> list[Told]:
    """What each rank of the default group found; on every rank."""
    try:
        mine = (True, _exchange() if torch.cuda.is_available() else "none without GPUs; ranks exchange by gloo")
    except Exception as error:
        mine = (False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    every: list[Told] = [(False, "")] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _exchange() -> str:
    import torch.distributed._symmetric_memory as symmetric_memory

    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = symmetric_memory.empty(SIZE, dtype=torch.int32, device=device)
    handle = symmetric_memory.rendezvous(mine, group.group_name)
    mine.fill_(rank + 1)
    handle.barrier(timeout_ms=PATIENCE)
    read = torch.empty_like(mine)
    speed = float("inf")
    for step in range(1, size):
        peer = (rank + step) % size
        theirs = handle.get_buffer(peer, (SIZE,), torch.int32)
        read.copy_(theirs)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        read.copy_(theirs)
        torch.cuda.synchronize()
        speed = min(speed, read.nbytes / (time.perf_counter() - begin) / 1e9)
        if not bool((read == peer + 1).all()):
            raise RuntimeError(f"reads other numbers than rank {peer} wrote")
    handle.barrier(timeout_ms=PATIENCE)
    if size == 1:
        return "allocated; there is no other rank to read from"
    return f"each of {size} ranks reads every other's, at {speed:.0f} GB/s and more, as of rank 0"


def _main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=90))
    every = every_rank()
    if dist.get_rank() == 0:
        print(json.dumps(every), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
