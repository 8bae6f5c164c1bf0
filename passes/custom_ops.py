"""Custom ops of model libraries that are one ATen call by their public contract.

Such an op exists for what ATen's does not give (determinism, another dtype), not to compute something else: values and
gradients are those of the ATen call, which is what the pass reads in its place. `tests/passes/test_custom_ops.py`
compares the two wherever the library is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _scatter_add(out: Any, index: Any, src: Any) -> tuple[Any, tuple[Any, ...]]:
    return aten.scatter_add.default, (out, 0, index, src)


def _grouped_mm(rows: Any, weight: Any, offs: Any) -> tuple[Any, tuple[Any, ...]]:
    return aten._grouped_mm.default, (rows, weight, offs)


MEANINGS: dict[str, Callable[..., tuple[Any, tuple[Any, ...]]]] = {
    "torchtitan::deterministic_scatter_add": _scatter_add,
    "transformers::grouped_mm_fallback": _grouped_mm,
}
"""By name: the ATen op and its arguments, from the custom op's own."""


def in_aten(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """An op and its arguments; those of the ATen call that a custom op stands for."""
    meaning = MEANINGS.get(func._schema.name)
    if meaning is None:
        return func, args, kwargs
    target, arguments = meaning(*args, **kwargs)
    return target, arguments, {}
