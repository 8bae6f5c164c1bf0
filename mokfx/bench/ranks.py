"""The ranks of a run: one, or as many as torchrun started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks; `group_name` is None if it is alone."""

    device: torch.device
    rank: int = 0
    size: int = 1
    group_name: str | None = None

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, one after the other along dim 0; all of one shape."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def share(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until all ranks are here and their devices idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.size > 1:
            dist.barrier()


def ranks(device: str) -> Ranks:
    """The ranks of the default process group, if there is one, else this process alone; `device` is "cuda" or "cpu"."""
    own = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    if not dist.is_initialized():
        return Ranks(own)
    group: Any = dist.group.WORLD
    return Ranks(own, dist.get_rank(), dist.get_world_size(), group.group_name)
