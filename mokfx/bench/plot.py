"""Results as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import BenchError
from .floor import Ceilings
from .run import Result

SUFFIXES = (".png", ".svg", ".pdf")


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files only. Raises BenchError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError:
        raise BenchError("pictures need matplotlib: pip install 'mokfx[bench]'") from None
    return importlib.import_module("matplotlib.pyplot")


def check_picture(path: Path) -> None:
    """Raises BenchError if no picture can be written there."""
    if path.suffix not in SUFFIXES:
        raise BenchError(f"{str(path)!r} is no picture's name; it must end in {', '.join(SUFFIXES)}")
    pyplot()


def plot(path: Path, by_layer: Sequence[Sequence[Result]], ceilings: Ceilings, backward: bool, title: str) -> None:
    """Bars of TFLOP/s, a group for each layer, a colour for each variant that was timed, and the dense product."""
    plt = pyplot()
    variants = list(dict.fromkeys(r.variant for results in by_layer for r in results if r.timing))
    figure, axes = plt.subplots(figsize=(2 + 2.2 * len(by_layer), 4.2), layout="constrained")
    wide = 0.85 / max(len(variants), 1)
    for i, variant in enumerate(variants):
        found = [
            (number, result.tflops(backward))
            for number, results in enumerate(by_layer)
            for result in results
            if result.variant == variant and result.timing
        ]
        places = [number + (i - (len(variants) - 1) / 2) * wide for number, _ in found]
        bars = axes.bar(places, [value for _, value in found], wide, label=variant)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, rotation=90, padding=2)
    axes.axhline(ceilings.products / 1e12, color="grey", linestyle="--", linewidth=1, label="dense product")
    axes.set_xticks(range(len(by_layer)), [results[0].shape.name for results in by_layer])
    axes.set_ylabel("TFLOP/s a rank, " + ("forward and backward" if backward else "forward"))
    axes.margins(y=0.15)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8, ncols=3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
