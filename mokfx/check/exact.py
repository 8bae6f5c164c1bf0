"""Run a program in float64, whatever dtypes it asks for, with the choices of experts that another run made."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten

Choices = deque[Tensor]
"""Indices that a program chose by comparing floats, in the order in which it did."""

CHOOSING = frozenset((aten.topk.default, aten.sort.default, aten.sort.stable, aten.argmax.default, aten.max.dim))
"""Where a program compares floats to choose. Rounding decides a near tie, so in another precision the choice is
another one, and the token's output has nothing to do with the first: such runs cannot be compared."""


class Recording(TorchDispatchMode):
    """Changes nothing, and keeps what was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: Choices = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in CHOOSING and args[0].is_floating_point():
            self.choices.append((out if isinstance(out, Tensor) else out[1]).clone())
        return out


class InFloat64(TorchDispatchMode):
    """Every floating-point dtype that the program asks for is float64; its choices are those recorded."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.choices = deque(choices)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        names = [a.name for a in func._schema.arguments]
        args = [a if name in written else tree_map(_wide, a) for name, a in zip(names, args, strict=False)]
        kwargs = {name: a if name in written else tree_map(_wide, a) for name, a in kwargs.items()}
        if func in CHOOSING and args[0].is_floating_point():
            return self._choose(func, args, kwargs)
        if func is aten._grouped_mm.default:
            return grouped_product(*args, **kwargs)
        return func(*args, **kwargs)

    def _choose(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        own = out if isinstance(out, Tensor) else out[1]
        if not self.choices or self.choices[0].shape != own.shape:
            return out
        chosen = self.choices.popleft()
        if isinstance(out, Tensor):
            return chosen
        dim = _dim(func, args, kwargs)
        if chosen.dim() < args[0].dim():  # `max` without keepdim
            return args[0].gather(dim, chosen.unsqueeze(dim)).squeeze(dim), chosen
        return args[0].gather(dim, chosen), chosen


@contextlib.contextmanager
def in_float64(choices: Choices) -> Iterator[None]:
    """The context of a run in float64 that repeats `choices`; its tensors have to be float64 already."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64(choices):
            yield
    finally:
        torch.set_default_dtype(default)


def wide(value: Any) -> Any:
    """A tensor with floating-point elements in float64; anything else as it is."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return wide(value)


def _dim(func: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    arguments = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    arguments |= dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return int(arguments["dim"])


def grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten._grouped_mm`, which torch has for the narrower dtypes only: a product for each group, a loop.

    `[n, k] @ [G, k, m] -> [n, m]` by groups of rows, `[m, n] @ [n, k] -> [G, m, k]` by groups of what is summed over,
    `[G, m, k] @ [k, n] -> [m, n]` by groups of columns, and `[G, m, k] @ [G, k, n]`.
    """
    if offs is None:
        out = a @ b
    else:
        ends = offs.tolist()
        parts = list(zip([0, *ends], ends, strict=False))
        product: dict[tuple[int, int], Callable[[int, slice], Tensor]] = {
            (2, 3): lambda g, part: a[part] @ b[g],
            (2, 2): lambda g, part: a[:, part] @ b[part],
            (3, 2): lambda g, part: a[g] @ b[:, part],
        }
        each = [product[a.dim(), b.dim()](g, slice(*part)) for g, part in enumerate(parts)]
        if (a.dim(), b.dim()) == (2, 2):
            out = torch.stack(each)
        else:
            by_row = b.dim() == 3
            out = a.new_zeros((a.shape[0], b.shape[-1]) if by_row else (a.shape[1], b.shape[-1]))
            if each:
                # Rows after the last group belong to none.
                joined = torch.cat(each, 0 if by_row else 1)
                out[tuple(map(slice, joined.shape))] = joined
    return out if bias is None else out + bias
