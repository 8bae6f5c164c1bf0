"""What `mokfx.check` found, as values and as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mokfx.errors import describe_miss
from mokfx.report import Report

TOLERANCE = 3.0
"""Units that a good comparison may have. A correct model has about 1, more where both errors are small by chance."""
MANY = 24
"""More rows than this are shown by groups: names that differ in numbers only, such as those of all experts."""


@dataclass(frozen=True)
class Comparison:
    """One output or one gradient. Errors are relative: the worst row's, in root mean squares of a row."""

    name: str
    """"output", "output[1]", "grad input[0]" (of the arguments' leaves), "grad layers.0.moe.router.weight"."""
    eager: float
    """Eager's distance from float64."""
    compiled: float
    """The compiled model's distance from float64."""
    unit: float
    """`eager`, or if that is less, the error of one rounding in the model's dtype."""
    same_bits: bool
    """Whether a second run of the compiled model gave the same bits."""
    note: str = ""
    """What more there is to say: that one of the two has no gradient, or another shape."""
    far_rows: int = 0
    """Rows that are more than 4 units off."""
    rows: int = 0

    @property
    def units(self) -> float:
        """The compiled model's error in units of eager's."""
        return self.compiled / self.unit


@dataclass(frozen=True)
class CheckResult:
    """Compiled beside eager and float64, on one rank. `print` it; `ok` is the verdict."""

    dtype: str
    """The coarsest floating-point dtype of parameters, inputs and autocast."""
    comparisons: tuple[Comparison, ...]
    """Outputs first, then gradients."""
    report: Report
    """What was rewritten and what was left alone."""
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        """A layer was rewritten, no error is more than `tolerance` units, and both runs gave the same bits."""
        return not self.problems

    @property
    def far(self) -> tuple[Comparison, ...]:
        """The comparisons with more than `tolerance` units, the worst first."""
        return tuple(sorted((c for c in self.comparisons if not c.units <= self.tolerance), key=_badness, reverse=True))

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this is not ok, a sentence each."""
        found = []
        if not self.report.matches:
            found.append("no MoE layer was rewritten, so this says nothing about mok.moe")
        if self.far:
            found.append(f"{_listed(self.far)} more than {self.tolerance:g} units from float64")
        if changed := [c for c in self.comparisons if not c.same_bits]:
            found.append(f"{_listed(changed)} not the same bits in two runs of the compiled model")
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "ok": self.ok,
            "problems": list(self.problems),
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "matches": [asdict(match) for match in self.report.matches],
            "misses": [asdict(miss) for miss in self.report.misses],
            "comparisons": [{**asdict(c), "units": c.units} for c in self.comparisons],
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 80, every: bool = False) -> str:
        """A table and a verdict.

        Args:
            width: columns of the terminal; long names are shortened in the middle.
            every: a row for each comparison, also if there are many; else groups, as the worst of them.
        """
        parts = (self.found(width), self.table(width, every), self.verdict(width))
        return "\n\n".join("\n".join(lines) for lines in parts)

    def found(self, width: int = 80) -> Iterator[str]:
        """The lines about what was rewritten, and what was not."""
        matched, missed = len(self.report.matches), len(self.report.misses)
        yield f"{self.dtype}; {_layers(matched)} became mok.moe" + (f", {missed} left alone:" if missed else "")
        for miss in self.report.misses:
            yield from _wrapped(describe_miss(miss), width, "  ")

    def table(self, width: int = 80, every: bool = False) -> Iterator[str]:
        """The lines of the table."""
        rows = [(c.name, c) for c in self.comparisons]
        if len(rows) > MANY and not every:
            rows = _grouped(self.comparisons)
        head = "xN: the worst of N" if len(rows) < len(self.comparisons) else ""
        longest = max(len(head), *(len(name) for name, _ in rows))
        names = min(longest, width - len("   1.2e-03   1.2e-03     12.34  <--"))
        yield f"{head:<{names}}     error     error  in units"
        yield f"{'':<{names}}  of eager  compiled  of eager"
        for name, c in rows:
            mark = "" if c.units <= self.tolerance and c.same_bits else "  <--"
            yield f"{_shortened(name, names):<{names}}  {c.eager:8.1e}  {c.compiled:8.1e}  {c.units:8.2f}{mark}"

    def verdict(self, width: int = 80) -> Iterator[str]:
        """The last lines: what is wrong, or that nothing is."""
        for problem in self.problems:
            yield from _wrapped(f"not good: {problem}", width)
        for c in self.far:
            if c.name.startswith("output") and 0 < c.far_rows < c.rows / 4:
                hint = (
                    f"{c.far_rows} of {c.rows} rows of {c.name} are far off, the others are not: two experts may tie "
                    "there in this dtype; check the model in float32 to be sure"
                )
                yield from _wrapped(hint, width, "  ")
        if self.ok:
            worst = max(self.comparisons, key=_badness)
            good = f"good: no error is more than {self.tolerance:g} units ({worst.units:.2f} in {worst.name}), and two "
            yield from _wrapped(good + "runs of the compiled model gave the same bits", width)


def _badness(comparison: Comparison) -> float:
    return comparison.units if comparison.units == comparison.units else float("inf")  # NaN is the worst


def _layers(number: int) -> str:
    return {0: "no MoE layer", 1: "1 MoE layer"}.get(number, f"{number} MoE layers")


def _listed(comparisons: tuple[Comparison, ...] | list[Comparison]) -> str:
    first = [f"{c.name} ({c.note})" if c.note else c.name for c in comparisons[:3]]
    more = f" and {len(comparisons) - 3} more" if len(comparisons) > 3 else ""
    return ", ".join(first) + more + (" is" if len(comparisons) == 1 else " are")


def _grouped(comparisons: tuple[Comparison, ...]) -> list[tuple[str, Comparison]]:
    """One row for all names that differ in numbers only: the worst, under their common name and their number."""
    groups: dict[str, list[Comparison]] = {}
    for c in comparisons:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", c.name), []).append(c)
    return [
        (name if len(group) == 1 else f"{name} x{len(group)}", max(group, key=_order)) for name, group in groups.items()
    ]


def _order(comparison: Comparison) -> tuple[bool, float]:
    return not comparison.same_bits, _badness(comparison)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shortened(name: str, columns: int) -> str:
    if len(name) <= columns:
        return name
    left = (columns - 3) // 2
    return f"{name[:left]}...{name[len(name) - (columns - 3 - left) :]}"
