"""Commands under torchrun: the process group, and what each rank tells the first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from mokfx.errors import MokError

T = TypeVar("T")


class RanksError(MokError):
    """The ranks that torchrun started cannot work here."""


HELP = (
    "Works under torchrun: the process group (nccl on GPUs, gloo elsewhere) is there before the function is called; "
    "each rank runs, rank 0 prints."
)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Under torchrun, the default process group and this rank's GPU; without torchrun, or if there is one, nothing.

    Raises:
        RanksError: there are more ranks than GPUs.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or dist.is_initialized():
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise RanksError(f"torchrun started a rank {local} on a host of {gpus} GPUs: give each rank one")
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    try:
        yield
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would break a slower peer's last collective
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def rank() -> int:
    """This process's rank; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def told_by_each(value: T) -> list[T]:
    """Each rank's value, in rank order, on every rank; without a group, just this one's."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # each has been filled in
