"""How far a tensor is from what it should be, as one number."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = {
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2,
    torch.float16: torch.finfo(torch.float16).eps / 2,
    torch.float32: 2 * torch.finfo(torch.float32).eps,
    torch.float64: 2**12 * torch.finfo(torch.float64).eps,
}
"""The least error that counts as one unit. Where eager happens to hit the exact number, as one loss may, its error says
nothing; and in float64 eager is itself the reference, so that only the order of its sums is left."""


def error(found: Tensor | None, exact: Tensor) -> float:
    """The distance of the worst row (of the last dimension), in root mean squares of a row of `exact`.

    By rows, so that one wrong token, or one wrong expert, shows among thousands of right ones; and not by elements,
    whose worst is mostly chance.

    Args:
        found: of the same shape; None, a gradient that does not exist, counts as zeros.
        exact: float64, of any shape.

    Returns:
        0.0 for equal tensors, also where both are infinite; inf if exact is all zeros and found is not.
    """
    if exact.numel() == 0:
        return 0.0
    given = torch.zeros_like(exact) if found is None else found.to(exact.dtype)
    difference = torch.where(given == exact, 0.0, given - exact)
    last = exact.shape[-1] if exact.dim() else 1
    size = exact.nan_to_num(0.0, 0.0, 0.0).reshape(-1, last).square().sum(-1).mean().sqrt().item()
    worst = difference.reshape(-1, last).square().sum(-1).sqrt().max().item()
    if worst == 0.0:
        return 0.0
    return worst / size if size > 0 else float("inf")


def far_rows(found: Tensor, exact: Tensor, bound: float) -> tuple[int, int]:
    """How many rows are farther than `bound`, in the measure of `error`, and how many there are."""
    last = exact.shape[-1] if exact.dim() else 1
    rows = exact.nan_to_num(0.0, 0.0, 0.0).reshape(-1, last)
    difference = torch.where(found.to(exact.dtype) == exact, 0.0, found.to(exact.dtype) - exact).reshape(-1, last)
    size = rows.square().sum(-1).mean().sqrt()
    return int((~(difference.square().sum(-1).sqrt() <= bound * size)).sum()), rows.shape[0]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are the same, NaNs and signs of zeros included; both None is the same."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
