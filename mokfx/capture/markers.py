"""The marker ops: what a captured graph assumes about sizes that only the data knows.

A marker is how a speculation stays honest. While it is in the graph it checks the assumption when it runs,
and raises; it leaves the graph only when the assumption is proven to be needless (see proof.py).

    mok::assume_nonempty(SymInt size, str where) -> ()
        There is at least one row: `if size == 0` was answered "no".
    mok::assume_every_expert(Tensor hit, Tensor rows, SymInt num_experts, str where) -> ()
        `rows`, made of `hit` by nonzero, lists all experts: the loop over it was unrolled for each of them.
"""

from __future__ import annotations

import torch
from torch.fx.node import has_side_effect

REMEDY = (
    "compile with mokfx.compile, which keeps such a graph only where a rewritten MoE layer makes it exact"
)


@torch.library.custom_op("mok::assume_nonempty", mutates_args=())
def assume_nonempty(size: int, where: str) -> None:
    """Raises RuntimeError if `size` is 0: the graph was captured for the branch that has rows."""
    if size == 0:
        raise RuntimeError(f"{where}: this graph was captured for at least one row, and got none; {REMEDY}")


@assume_nonempty.register_fake
def _(size: int, where: str) -> None:
    return None


@torch.library.custom_op("mok::assume_every_expert", mutates_args=())
def assume_every_expert(hit: torch.Tensor, rows: torch.Tensor, num_experts: int, where: str) -> None:
    """Raises RuntimeError unless `rows` (what `hit.nonzero()`, `torch.where(hit)` made) has one row for each
    expert.

    hit [num_experts] bool or integer: nonzero where an expert has tokens. rows [n, 1] or [n] int64.
    """
    if rows.shape[0] != num_experts:
        raise RuntimeError(
            f"{where}: this graph was captured for a loop over all {num_experts} experts, "
            f"and {rows.shape[0]} were hit; {REMEDY}"
        )


@assume_every_expert.register_fake
def _(hit: torch.Tensor, rows: torch.Tensor, num_experts: int, where: str) -> None:
    return None


NONEMPTY = torch.ops.mok.assume_nonempty.default
EVERY_EXPERT = torch.ops.mok.assume_every_expert.default
MARKERS = (NONEMPTY, EVERY_EXPERT)

# A marker has no result: without this FX calls it dead, and an assumption that vanishes is a wrong answer.
for _marker in MARKERS:
    has_side_effect(_marker)
