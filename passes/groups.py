"""Process groups by name: what this process knows of them."""

from __future__ import annotations

import torch.distributed as dist


def group_rank(group_name: str) -> int | None:
    """This process's rank in a group, or None if no such group exists here."""
    group = _group(group_name)
    return None if group is None else dist.get_rank(group)


def group_size(group_name: str) -> int | None:
    """The number of ranks of a group, or None if no such group exists here."""
    group = _group(group_name)
    return None if group is None else dist.get_world_size(group)


def _group(group_name: str) -> dist.ProcessGroup | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    try:
        group: dist.ProcessGroup = _resolve_process_group(group_name)  # type: ignore[arg-type]
    except (ValueError, RuntimeError, LookupError):
        return None
    return group
