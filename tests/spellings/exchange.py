"""Expert parallelism: slots sorted by expert go to the ranks that own the experts, are regrouped by local
expert, and come back the same way. Experts lie in blocks: expert e belongs to rank e // (E / R)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from .collectives import EXCHANGES, Form, Splits


class Sent(NamedTuple):
    """What both directions need to know of one exchange."""

    in_splits: Splits
    out_splits: Splits
    counts: Tensor
    """[E / R] int64: rows of each local expert."""
    order: Any
    """What the regrouping spelling wants to undo itself with."""


# --- each expert's number of slots, from every rank: [E] to [R * E / R] ---


def counts_plain(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received


def counts_no_grad(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    with torch.no_grad():
        received = counts.new_empty(counts.shape)
        dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def counts_functional(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, group))


def counts_gathered(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Everybody's counts to everybody, then the columns of this rank's experts."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    everybody = torch.empty(ranks * counts.shape[0], dtype=counts.dtype, device=counts.device)
    dist.all_gather_into_tensor(everybody, counts, group=group)
    return everybody.view(ranks, ranks, -1)[:, rank].reshape(-1)


COUNT_EXCHANGES: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    f.__name__: f for f in (counts_plain, counts_no_grad, counts_functional, counts_gathered)
}

# --- counts by rank and expert [R, E / R] to sizes known to Python ---

SPLITS: dict[str, Callable[[Tensor], list[int]]] = {
    "tolist": lambda counts: counts.sum(dim=1).tolist(),
    "cpu_tolist": lambda counts: counts.sum(-1).to("cpu").tolist(),
    "item": lambda counts: [int(counts[r].sum().item()) for r in range(counts.shape[0])],
    "item_of_sums": lambda counts: [c.item() for c in counts.sum(1)],
}

# --- received rows, in order of source rank and then expert, to order of local expert; and back ---


def group_argsort(rows: Tensor, counts: Tensor) -> tuple[Tensor, Any]:
    ranks, local = counts.shape
    ids = torch.arange(local, device=rows.device).repeat(ranks).repeat_interleave(counts.reshape(-1))
    order = torch.argsort(ids, stable=True)
    return rows[order], order


def group_argsort_sized(rows: Tensor, counts: Tensor) -> tuple[Tensor, Any]:
    ranks, local = counts.shape
    ids = torch.arange(local, device=rows.device).expand(ranks, local).reshape(-1)
    ids = torch.repeat_interleave(ids, counts.reshape(-1), output_size=rows.shape[0])
    order = ids.sort(stable=True)[1]
    return rows.index_select(0, order), order


def group_index(rows: Tensor, counts: Tensor) -> tuple[Tensor, Any]:
    """Where each block (expert, rank) starts among the received rows, and a running number inside it."""
    flat = counts.reshape(-1)
    starts = (flat.cumsum(0) - flat).view(counts.shape).t().reshape(-1)
    sizes = counts.t().reshape(-1)
    begins = sizes.cumsum(0) - sizes
    shift = torch.repeat_interleave(starts - begins, sizes, output_size=rows.shape[0])
    order = torch.arange(rows.shape[0], device=rows.device) + shift
    return rows[order], order


def ungroup_argsort(out: Tensor, order: Any) -> Tensor:
    return out[torch.argsort(order)]


def ungroup_setitem(out: Tensor, order: Any) -> Tensor:
    back = torch.empty_like(out)
    back[order] = out
    return back


def ungroup_index_copy(out: Tensor, order: Any) -> Tensor:
    return out.new_zeros(out.shape).index_copy(0, order, out)


def group_split_cat(rows: Tensor, counts: Tensor) -> tuple[Tensor, Any]:
    ranks, local = counts.shape
    sizes = counts.reshape(-1).tolist()
    chunks = rows.split(sizes, dim=0)
    grouped = torch.cat([chunks[r * local + e] for e in range(local) for r in range(ranks)], dim=0)
    return grouped, (sizes, ranks, local)


def ungroup_split_cat(out: Tensor, order: Any) -> Tensor:
    sizes, ranks, local = order
    chunks = torch.split(out, [sizes[r * local + e] for e in range(local) for r in range(ranks)])
    return torch.cat([chunks[e * ranks + r] for r in range(ranks) for e in range(local)])


REGROUP: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Any]], Callable[[Tensor, Any], Tensor]]] = {
    "argsort": (group_argsort, ungroup_argsort),
    "argsort_sized": (group_argsort_sized, ungroup_setitem),
    "index": (group_index, ungroup_setitem),
    "index_copy": (group_index, ungroup_index_copy),
    "split_cat": (group_split_cat, ungroup_split_cat),
}
IDS_SENT = ("ids_sent", "ids_sent_modulo")
"""Also regroupings: the expert ids travel with the rows, and the receiver sorts by them."""


def send(
    rows: Tensor,
    weight: Tensor | None,
    sorted_ids: Tensor,
    counts: Tensor,
    *,
    form: Form,
    count_exchange: str,
    splits: str,
    regroup: str,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor | None, Sent]:
    """Sorted rows [n, H] (and their weights [n, 1]) to rows by local expert [m, H] (and weights [m, 1])."""
    ranks = dist.get_world_size(group)
    local = counts.shape[0] // ranks
    received = COUNT_EXCHANGES[count_exchange](counts, group).view(ranks, local)
    in_splits = SPLITS[splits](counts.view(ranks, local))
    out_splits = SPLITS[splits](received)
    arrived = form(rows, out_splits, in_splits, group)
    arrived_weight = None if weight is None else form(weight, out_splits, in_splits, group)
    if regroup in IDS_SENT:
        ids = EXCHANGES["functional"](sorted_ids, out_splits, in_splits, group)
        ids = ids % local if regroup == "ids_sent_modulo" else ids - dist.get_rank(group) * local
        order = torch.argsort(ids, stable=True)
        grouped = arrived[order]
        local_counts = torch.zeros(local, dtype=torch.int64, device=ids.device)
        local_counts = local_counts.scatter_add(0, ids, torch.ones_like(ids))
    else:
        grouped, order = REGROUP[regroup][0](arrived, received)
        local_counts = received.sum(dim=0)
    if arrived_weight is not None:
        arrived_weight = (
            REGROUP[regroup][0](arrived_weight, received)[0]
            if regroup == "split_cat"
            else arrived_weight[order]
        )
    return grouped, arrived_weight, Sent(in_splits, out_splits, local_counts, order)


def send_back(out: Tensor, sent: Sent, *, form: Form, regroup: str, group: dist.ProcessGroup) -> Tensor:
    """Outputs by local expert [m, H] back to the sorted slots they came from [n, H]."""
    ungroup = ungroup_argsort if regroup in IDS_SENT else REGROUP[regroup][1]
    return form(ungroup(out, sent.order), sent.in_splits, sent.out_splits, group)
