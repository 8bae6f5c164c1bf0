"""Slots travel to the rank that owns their expert, and back.

Making an `Exchange` and calling its methods are collectives: every rank of the group does the same, also one
without tokens. On the owner an expert's rows lie in (rank, slot) order. That is the same order for any number
of ranks, and so are the bits of its products.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def resolve_group(group_name: str) -> Any:
    """The process group of that name.

    Raises:
        ValueError: no group of that name is registered in this process.
    """
    if dist.is_available():
        c10d: Any = dist.distributed_c10d  # untyped: the types of group names differ between torch releases
        try:
            return c10d._resolve_process_group(group_name)
        except (RuntimeError, ValueError, LookupError):
            pass
    raise ValueError(
        f"mok.moe: no process group named {group_name!r} exists in this process; "
        "pass group.group_name of an initialised group, or None for one rank"
    )


def group_size(group_name: str | None) -> int:
    """Number of ranks of that group, 1 for None. Raises as `resolve_group`."""
    return 1 if group_name is None else int(resolve_group(group_name).size())


class Exchange:
    """The plan of one call's dispatch and combine.

    Args:
        ids: `[n]`, the expert of each slot of this rank, -1 for a dropped one.
        num_experts: experts of all ranks.
        group_name: the group, None for one rank.
    """

    def __init__(self, ids: Tensor, num_experts: int, group_name: str | None) -> None:
        self._group = None if group_name is None else resolve_group(group_name)
        ranks = group_size(group_name)
        self._slots = ids.shape[0]
        order = torch.argsort(ids, stable=True)
        counts = torch.bincount(ids + 1, minlength=num_experts + 1)
        self._order = order[int(counts[0]) :]  # dropped slots sort first and do not travel
        sent = counts[1:].view(ranks, num_experts // ranks)
        received = sent
        if self._group is not None:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent.contiguous(), group=self._group)
        self._sent: list[int] = sent.sum(1).tolist()
        self._received: list[list[int]] = received.tolist()
        """`_received[r][e]`: rows from rank r for local expert e."""

    def dispatch(self, rows: Tensor, of_slot: Tensor | None = None) -> list[Tensor]:
        """Rows to their experts: for each local expert all ranks' rows in (rank, slot) order, a new tensor.

        Args:
            rows: `[n, ...]`, a row for each slot, or any number of rows that `of_slot` `[n]` chooses from.
        """
        index = self._order if of_slot is None else of_slot[self._order]
        arrived = self._move(rows[index], self._sent, [sum(counts) for counts in self._received])
        experts = len(self._received[0])
        pieces = arrived.split([count for counts in self._received for count in counts])
        return [torch.cat(pieces[expert::experts]) for expert in range(experts)]

    def combine(self, rows: list[Tensor]) -> Tensor:
        """The way back: what `dispatch` gave, `[n, ...]` by slot, with zeros for dropped slots."""
        by_expert = [rows[e].split([counts[e] for counts in self._received]) for e in range(len(rows))]
        leaving = torch.cat([by_expert[e][r] for r in range(len(self._received)) for e in range(len(rows))])
        back = self._move(leaving, [sum(counts) for counts in self._received], self._sent)
        slots = back.new_zeros(self._slots, *back.shape[1:])
        slots[self._order] = back
        return slots

    def _move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self._group is None:
            return rows
        # As bytes: backends differ in which float dtypes they take.
        flat = rows.contiguous().view(rows.shape[0], prod(rows.shape[1:])).view(torch.uint8)
        arrived = flat.new_empty(sum(received), flat.shape[1])
        dist.all_to_all_single(arrived, flat, received, sent, group=self._group)
        return arrived.view(rows.dtype).view(sum(received), *rows.shape[1:])
