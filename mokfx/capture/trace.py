"""What one frame's trace assumed, kept beside Dynamo's graph until it is proven."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._dynamo.variables.base import VariableTracker
from torch.fx import Node

from mokfx.capture.plan import Plan
from mokfx.capture.source import Site


@dataclass
class Moment:
    """One time that a speculation was made: the translator of the function, and the size that was taken as >=
    1."""

    translator: Any
    size: sympy.Basic | None
    like: torch.Tensor | None = None
    """The fake tensor named by the plan's `same_as`, as it was at that moment."""


@dataclass
class Assumption:
    """A speculation at one line of the user's source, and what must be proven of it."""

    site: Site
    kind: str
    """"loop" or "branch"."""
    subject: str
    """How to speak of it: "the loop over `hit.nonzero()`"."""
    plan: Plan
    moments: list[Moment] = field(default_factory=list)
    lists: dict[Node, int] = field(default_factory=dict)
    """The nonzero nodes that a loop runs over, each with its number of experts."""
    old: list[VariableTracker] = field(default_factory=list)
    """Python objects that existed before: the skipped statements must not change them."""

    skips: dict[tuple[Node, int], int] = field(default_factory=dict)
    """(list, expert) of each round of the loop that `if expert == ...: continue` ended, with the line of the
    `if`."""
    times: int = 0
    """How often the statements were traced: once for each expert."""

    def holds(self, filename: str, line: int) -> bool:
        """Whether a line is among the statements that an empty expert skips."""
        return any(effects.lines.holds(filename, line) for effects in self.plan.effects)


@dataclass
class Trace:
    """The assumptions of one Dynamo output graph."""

    assumptions: dict[tuple[Site, str], Assumption] = field(default_factory=dict)
    hit_lists: dict[Node, int] = field(default_factory=dict)
    """nonzero nodes that a loop runs over, each with its number of experts."""
    lengths: dict[str, str] = field(default_factory=dict)
    """The message for each assertion about a bincount's length, by its symbol."""
    closed: bool = False
    """The graph is finished: what is asked from here on (by the pass, by Inductor) is not the user's
    question."""

    def clear(self) -> None:
        """Lets go of Dynamo's objects."""
        self.assumptions.clear()
        self.hit_lists.clear()


def objects_in_reach(translator: Any) -> list[VariableTracker]:
    """The Python objects that the running function, its callers and their closures can name."""
    effects = translator.output.side_effects
    roots: list[Any] = [*effects.store_attr_mutations.values(), dict(effects.id_to_variable)]
    while translator is not None:
        roots += [dict(translator.symbolic_locals), list(translator.stack)]
        translator = translator.parent
    found: list[VariableTracker] = []
    VariableTracker.visit(found.append, roots)
    return found
