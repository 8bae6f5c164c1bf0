"""Draw nodes that do the same for one expert each as one: a loop over 64 experts is read at a glance.

Two nodes are the same if they call the same on the same line, in the same stage, on inputs that are the same. A node
that goes on where such a one ended, expert by expert (`y = y.index_add(...)`, `y[token] += ...`), joins it too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mokfx.page.picture import Step

Key = tuple[object, ...]


def fold(steps: Sequence[Step], chains: bool = True) -> tuple[Step, ...]:
    """The steps with equal ones put together, each still after those that it needs.

    Args:
        chains: whether a step joins those that it goes on from. Not for steps of several layers: there, one layer
            goes on from another.
    """
    groups: list[_Group] = []
    group_of: list[int] = []
    by_key: dict[Key, list[int]] = {}
    for step in steps:
        inputs = {group_of[j] for j in step.inputs}
        same = by_key.setdefault(_key(step), [])
        found = next((g for g in same if groups[g].takes(step, inputs, g, groups, chains)), len(groups))
        if found == len(groups):
            behind = inputs.union(*(groups[g].behind for g in inputs))
            groups.append(_Group(inputs, behind))
            same.append(found)
        groups[found].steps.append(step)
        group_of.append(found)
    return tuple(_one(group.steps, sorted(group.needs)) for group in groups)


def nearest(steps: Sequence[Step], center: int, before: int, after: int) -> tuple[Step, ...]:
    """The step `center`, and those closest to it: at most so many that it needs, and so many that need it."""
    users = [[j for j, step in enumerate(steps) if i in step.inputs] for i in range(len(steps))]
    kept = {*_reached(center, [step.inputs for step in steps], before), *_reached(center, users, after)}
    position = {old: new for new, old in enumerate(sorted(kept))}
    return tuple(
        replace(steps[i], inputs=tuple(position[j] for j in steps[i].inputs if j in position)) for i in position
    )


def _reached(start: int, edges: Sequence[Sequence[int]], limit: int) -> list[int]:
    found = [start]
    for i in found:
        found += [j for j in edges[i] if j not in found][: limit + 1 - len(found)]
    return found


@dataclass
class _Group:
    needs: set[int]
    behind: set[int]
    """All groups that it depends on."""
    steps: list[Step] = field(default_factory=list)

    def takes(self, step: Step, inputs: set[int], own: int, groups: list[_Group], chains: bool) -> bool:
        """Whether a step with the same key does the same: on the same inputs, or on what this group led to."""
        meanings = {_of_each(other.meaning) for other in (self.steps[0], step)} - {""}
        carried = {g for g in inputs if chains and (g == own or own in groups[g].behind)}
        return len(meanings) < 2 and (inputs == self.needs or (bool(carried) and inputs - carried <= self.needs))


def _key(step: Step) -> Key:
    called = step.op or _pattern(step.name)
    return (called, step.stage, step.where, step.code, step.kept, step.quiet)


def _one(steps: list[Step], inputs: list[int]) -> Step:
    first = steps[0]
    weights = tuple(dict.fromkeys(name for step in steps for name in step.weights))
    return replace(
        first,
        inputs=tuple(inputs),
        count=sum(step.count for step in steps),
        weights=_summed_names(weights),
        meaning=_common([step.meaning for step in steps]),
        shape=_common([step.shape for step in steps]),
    )


def _summed_names(names: Sequence[str]) -> tuple[str, ...]:
    """`moe_1_gate_0_weight`, `moe_1_gate_1_weight`, ... as `moe_1_gate_*_weight x8`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return tuple(f"{_in_common(group)} x{len(group)}" if len(group) > 1 else group[0] for group in groups.values())


def _in_common(names: Sequence[str]) -> str:
    """Names that differ in numbers only, as one, with a star for each number in which they do."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _of_each(text: str) -> str:
    """A meaning without the number of the expert that it is about."""
    return re.sub(r"\b(local )?expert \d+", r"each \1expert", text)


def _common(texts: list[str]) -> str:
    """A text that holds of all of them; "" if there is none."""
    if len(set(texts)) == 1:
        return texts[0]
    each = set(map(_of_each, texts)) - {""}
    return each.pop() if len(each) == 1 else ""
