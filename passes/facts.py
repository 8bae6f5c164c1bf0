"""Which fact holds of which tensor while a graph runs: aliases, in-place changes, sizes that are data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.functions import FloorDiv

from mokfx.passes.bijections import rows_counted
from mokfx.passes.terms import Size, Term, as_size, integer, lin, make, quotient
from mokfx.passes.value import Leaf, Value, leaf_value


@dataclass
class View:
    """How a tensor is a view: the op that made it from `base`."""

    base: torch.Tensor
    call: Any


@dataclass
class Entry:
    tensor: torch.Tensor  # kept alive, so that its id stays its own
    value: Value
    version: int


class Facts:
    """The facts of one graph. A fact is about a tensor as it was when last written."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._views: dict[int, View] = {}
        self._versions: dict[int, int] = {}
        self._scalars: dict[sympy.Expr, Term] = {}
        self._data: set[sympy.Basic] = set()
        """The symbols that name numbers read from tensors."""

    def version(self, tensor: torch.Tensor) -> int:
        """How often the tensor's storage was changed in place so far."""
        return self._versions.get(storage_of(tensor), 0)

    def get(self, tensor: torch.Tensor) -> Value | None:
        """The fact about a tensor, or None if none is known or it was changed through an alias."""
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.version == self.version(tensor):
            return entry.value
        view = self._views.get(id(tensor))
        if entry is None or view is None:
            return None
        value = view.call.rerun(view.base)
        if value is not None:
            self.set(tensor, value)
        return value

    def set(self, tensor: torch.Tensor, value: Value) -> None:
        self._entries[id(tensor)] = Entry(tensor, value, self.version(tensor))

    def leaf(self, tensor: torch.Tensor, node: Node, **known: Any) -> Value:
        """Take a tensor as given from here on."""
        value = leaf_value(Leaf(tensor, node, version=self.version(tensor), **known), shape_of(tensor))
        self.set(tensor, value)
        return value

    def write(self, tensor: torch.Tensor, value: Value | None) -> None:
        """Record an in-place change of a tensor and, through views, of what it is a view of."""
        before = self.get(tensor)
        chain = self._bases(tensor)
        bases = [self.get(view.base) for view in chain]
        self._versions[storage_of(tensor)] = self.version(tensor) + 1
        if value is None or before is None:
            return
        self.set(tensor, value)
        written: Value | None = value
        for view, base in zip(chain, bases, strict=True):
            written = None if written is None or base is None else view.call.write_back(base, written)
            if written is None:
                return
            self.set(view.base, written)

    def add_view(self, tensor: torch.Tensor, base: torch.Tensor, call: Any) -> None:
        self._views[id(tensor)] = View(base, call)

    def _bases(self, tensor: torch.Tensor) -> list[View]:
        chain: list[View] = []
        while (view := self._views.get(id(tensor))) is not None:
            chain.append(view)
            tensor = view.base
        return chain

    # -- sizes that are data ---------------------------------------------------------------------------------------

    def set_scalar(self, number: Any, term: Term) -> None:
        """Record what an integer that was read from a tensor means."""
        if isinstance(number, torch.SymInt):
            # Under its own name and under the one that torch may have found equal to it since.
            self._scalars[number.node._expr] = term
            self._data |= number.node._expr.free_symbols
            self._scalars.setdefault(number.node.expr, term)

    def rename_scalar(self, old: torch.SymInt, new: torch.SymInt) -> None:
        self.rename_size(old.node._expr, new.node._expr)
        self.rename_size(old.node._expr, new.node.expr)

    def rename_size(self, old: Size, new: Size) -> None:
        """What `old` means, `new` means too."""
        if old != new and old in self._scalars and isinstance(new, sympy.Expr):
            self._scalars.setdefault(new, self._scalars[old])
            self._data |= new.free_symbols

    def set_size(self, size: Size, term: Term) -> None:
        """Record what a size that is data means."""
        if isinstance(size, sympy.Expr):
            self._scalars[size] = term
            self._data |= size.free_symbols

    def scalar(self, number: Any) -> Term:
        """An integer of the program as a term: known sizes and offsets become counts of rows."""
        if isinstance(number, torch.SymInt):
            named = self.size_term(_int(number.node._expr))
            if not _has_size(named):
                return named
        return self.size_term(as_size(number))

    def known_size(self, size: Size) -> Size:
        """A size that the program adds up from the counts of all experts is the number of slots."""
        if isinstance(size, FloorDiv):
            whole, by = (self.known_size(_int(part)) for part in size.args)
            share = quotient(whole, by)
            return size if share is None else share
        if isinstance(size, int) or not (size.free_symbols & self._data):
            return size
        total = rows_counted(self.size_term(size))
        return size if total is None else total

    def size_term(self, size: Size) -> Term:
        if isinstance(size, int):
            return integer(size)
        if size in self._scalars:
            return self._scalars[size]
        if isinstance(size, sympy.Add):
            return lin((self.size_term(_int(part)), 1) for part in size.args)
        if isinstance(size, sympy.Mul) and len(size.args) == 2 and isinstance(size.args[0], sympy.Integer):
            return lin([(self.size_term(_int(size.args[1])), int(size.args[0]))])
        return make("size", size)


def _has_size(term: Term) -> bool:
    """Whether a part of a number is one that nothing is known of."""
    return term.op == "size" or (term.op == "lin" and any(_has_size(t) for t, _ in term.args[1]))


def _int(size: Any) -> Size:
    return int(size) if isinstance(size, sympy.Integer) else size


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


EMPTY = sympy.Symbol("empty", integer=True, positive=True)
"""A size that is zero. What holds for any number of tokens holds for none, but nothing can be told from a range
without positions, so reasoning treats it as a number that it does not know."""


def shape_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    return tuple(EMPTY if size == 0 else size for size in map(as_size, tensor.shape))
