"""Results as a table and as JSON."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mokfx.kernels.build import source_key

from .floor import Ceilings
from .ranks import Ranks
from .run import Protocol, Result

PLAIN = ("eager", "inductor")
"""What ratios are against: the better of these."""


def machine(ranks: Ranks) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    gpu = ranks.device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(ranks.device) if gpu else platform.processor() or platform.machine(),
        "ranks": ranks.size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "kernels": source_key(),
    }


def heading(facts: dict[str, Any], ceilings: Ceilings, protocol: Protocol) -> str:
    """The lines above all tables: machine, protocol, ceilings."""
    cuda = f", CUDA {facts['cuda']}" if facts["cuda"] else ""
    ranks = "1 rank" if facts["ranks"] == 1 else f"{facts['ranks']} ranks, a time is the slowest's"
    what = "forward and backward" if protocol.backward else "forward"
    link = f", {ceilings.link / 1e9:.0f} GB/s to other ranks" if ceilings.link is not None else ""
    return (
        f"{facts['card']}, torch {facts['torch']}{cuda}, {ranks}\n"
        f"{what}, {protocol.calls} calls back to back, median of {protocol.groups} such\n"
        f"measured here: dense bf16 product {ceilings.products / 1e12:.3g} TFLOP/s, "
        f"copy in memory {ceilings.memory / 1e12:.3g} TB/s{link}"
    )


def best_plain(results: Iterable[Result]) -> float | None:
    """Milliseconds of the better of `PLAIN` on one layer, None if neither was timed."""
    times = [result.timing.median for result in results if result.timing and result.variant in PLAIN]
    return min(times, default=None)


def table(results: Sequence[Result], backward: bool) -> str:
    """The results of one layer: a line a variant, with the ratio first."""
    shape, plain = results[0].shape, best_plain(results)
    least = next((result.floor for result in results if result.floor), None)
    lines = [str(shape) + (f"; floor {least.milliseconds:.3f} ms, by {least.limit}" if least else "")]
    columns = f"{'ratio':>7}{'ms':>10}{'fastest':>10}{'slowest':>10}{'TFLOP/s':>9}{'of floor':>10}{'error':>10}"
    lines.append(f"  {'variant':<20}{columns}")
    for result in results:
        timing = result.timing
        if timing is None:
            what = "WRONG or broken, not timed: " if result.failed else "not available: "
            lines.append(f"  {result.variant:<20}  {what}{result.reason}")
            continue
        ratio = f"{plain / timing.median:.2f}x" if plain else ""
        part = f"{result.floor.milliseconds / timing.median:.0%}" if result.floor else ""
        error = f"{max(result.errors.values()):.1e}" if result.errors else ""
        lines.append(
            f"  {result.variant:<20}{ratio:>7}{timing.median:>10.3f}{timing.fastest:>10.3f}{timing.slowest:>10.3f}"
            f"{result.tflops(backward):>9.3g}{part:>10}{error:>10}  {result.note}".rstrip()
        )
    return "\n".join(lines)


FOOTNOTE = """\
ratio: times as fast as the better of eager and inductor; of floor: least possible time by what was measured here over
the time; error: the largest relative error to float32 of y and of each gradient, and of one row of them; a variant
without one is only a part of the layer."""


def as_json(
    facts: dict[str, Any], ceilings: Ceilings, protocol: Protocol, by_layer: Sequence[Sequence[Result]]
) -> dict[str, Any]:
    """Everything that the tables say, and each error apart."""
    rows = []
    for results in by_layer:
        plain = best_plain(results)
        for result in results:
            row = dataclasses.asdict(result)
            if result.timing is not None:
                row["tflops"] = result.tflops(protocol.backward)
                row["ratio"] = plain / result.timing.median if plain else None
                row["of_floor"] = result.floor.milliseconds / result.timing.median if result.floor else None
            rows.append(row)
    return {
        "machine": facts,
        "protocol": dataclasses.asdict(protocol),
        "ceilings": dataclasses.asdict(ceilings),
        "results": rows,
    }
