"""A row of the table of systems: one layer as its package ships it, small enough for a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """A layer that was built, and what it is called with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    moe_layers: int = 1
    """How many MoE layers `model` has, each of which is to become one `mok.moe`."""


@dataclass(frozen=True)
class Row:
    """One layer of one system.

    A row is sent to other processes, so `build` is a function of a module, or a `functools.partial` of one. It
    imports the package itself, seeds torch itself, and is called on each rank.
    """

    system: str
    """What the table calls the system."""
    package: str
    """The module that has to be there."""
    layer: str
    """What users of the system call the layer."""
    build: Callable[[torch.dtype], Case]
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.bfloat16)
    """Each is captured, compared with eager, and has to come to the same verdict."""
    ranks: int = 1
    parallel: str = ""
    """The package's name for its expert parallelism, where `ranks` is more than 1."""

    @property
    def name(self) -> str:
        """What tests call it."""
        return " ".join(part for part in (self.system, self.layer, self.parallel) if part)

    @property
    def missing(self) -> str:
        """The package, if it is not installed."""
        return "" if importlib.util.find_spec(self.package) else self.package


@dataclass(frozen=True)
class Verdict:
    """What became of a row. All strings are those of the report."""

    matched: bool
    kept: tuple[str, ...] = ()
    """What the model also uses of a matched layer."""
    reason: str = ""
    """Why a layer was not matched."""
