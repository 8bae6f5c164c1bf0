"""Several ranks of a group as blocks of one launch on one GPU: for tests of R up to 8 without R GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .driver import MAX_RANKS, Params, kernel, launch
from .exchange import Areas, Ranks
from .forward import _blocks, arguments
from .layer import Layer


class _Arguments(ctypes.Structure):
    """`VirtualRanks` of forward.cu."""

    _fields_ = (("rank", Params * MAX_RANKS),)


class VirtualGroup:
    """R ranks (2, 4 or 8) on the current GPU, with room for `tokens` tokens each; one group serves all layers."""

    def __init__(self, ranks: int, tokens: int, choices: int, width: int) -> None:
        if ranks not in (2, 4, 8):
            raise ValueError(f"{ranks} virtual ranks: it must be 2, 4 or 8")
        self.areas = Areas(ranks, tokens, choices, width)
        self.memory = [torch.zeros(self.areas.bytes, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
        self.states = torch.zeros(ranks, 4, dtype=torch.int32, device="cuda")

    def forward(
        self,
        xs: Sequence[Tensor],
        ids: Sequence[Tensor],
        weights: Sequence[Tensor],
        layers: Sequence[Layer],
        saved: Sequence[Tensor] | None = None,
        timeout: float = 5.0,
        blocks: int | None = None,
    ) -> list[Tensor]:
        """`forward` of every rank in one launch: lists by rank. `blocks`: of each rank, as many as fit if None."""
        ranks, device = len(self.memory), xs[0].device
        most = _blocks(device.index or 0) // ranks
        blocks = most if blocks is None else min(blocks, most)
        addresses = tuple(memory.data_ptr() for memory in self.memory)
        argument, keep, ys = _Arguments(), [], []
        for rank in range(ranks):
            x, here = xs[rank], Ranks(rank, addresses, self.areas, self.states[rank].data_ptr(), virtual=True)
            ys.append(torch.empty_like(x))
            kept = saved[rank] if saved else None
            params, work = arguments(ys[-1], x, ids[rank], weights[rank], layers[rank], blocks, kept, timeout, here)
            argument.rank[rank] = params
            keep.append(work)
        function = kernel(device.index or 0, "mok_forward_virtual_general")
        launch(function, blocks * ranks, argument, torch.cuda.current_stream().cuda_stream)
        return ys
