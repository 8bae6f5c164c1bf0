"""Why a kernel gave up: it writes a record to host memory before it ends the launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def fault_record() -> Tensor:
    """Host memory in which a kernel that gives up writes why: reason, block, thread, what it found."""
    return torch.zeros(4, dtype=torch.int32, pin_memory=True)


REASONS = {
    1: "an expert id out of range: {2}",
    2: "the other blocks of the grid did not arrive",
    3: "a stage of operands was never filled",
    4: "a stage of operands was never emptied",
    5: "no next tile was announced",
    6: "the announced tile was never read",
    7: "rows of hidden were not finished by other blocks ({2} had been)",
    8: "slot outputs were not finished by other blocks ({2} had been)",
    9: "rank {2} did not send its expert ids",
    10: "rank {2} did not send its rows of x",
    11: "rank {2} did not finish its slot outputs",
}


def fault() -> str | None:
    """Why the last kernel gave up, in a sentence, or None. After a fault the CUDA context is lost."""
    reason, block, thread, found = fault_record().tolist()
    if reason == 0:
        return None
    return f"block {block}, thread {thread}: " + REASONS[reason].format(block, thread, found)
