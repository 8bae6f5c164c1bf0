"""What every block of the kernel did, and when, from timestamps that it writes itself: a trace and a picture."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mokfx.kernels import provider
from mokfx.kernels.build import SOURCE
from mokfx.kernels.forward import TRACE_EVENTS
from mokfx.ops import unsupported_reason

from .errors import BenchError
from .layer import Layer
from .plot import SUFFIXES, check_picture, pyplot

CLOSES = {
    "COUNTED": "count",
    "PLACED": "place",
    "TILE_BEGIN": "wait",
    "TILE_MULTIPLIED": "{phase}",
    "TILE_STORED": "{phase}, epilogue",
    "ALL_STORED": "wait",
    "COMBINED": "combine",
}
"""The name of the span that ends at an event, where the event's own name does not say it."""
PHASES = {"UP": "gate/up", "DOWN": "down"}
COLORS = {
    "count": "#9aa5b1",
    "place": "#64748b",
    "wait": "#e5484d",
    "gate/up": "#1f6fb2",
    "gate/up, epilogue": "#8fc1e8",
    "down": "#1b8a5a",
    "down, epilogue": "#9bdcbb",
    "combine": "#c79a1b",
}


@dataclass(frozen=True)
class Span:
    """What one block did from `start` to `end`, in microseconds of the launch."""

    block: int
    name: str
    start: float
    end: float


def header_enum(name: str) -> dict[int, str]:
    """An enum of the kernel's header: numbers to names."""
    found = re.search(rf"enum {name} : int {{(.*?)}};", (SOURCE / "layout.cuh").read_text(), re.DOTALL)
    assert found, f"layout.cuh has no enum {name}"
    numbers: dict[int, str] = {}
    following = 0
    for entry in re.sub(r"//.*", "", found.group(1)).split(","):
        label, _, value = (part.strip() for part in entry.partition("="))
        if label:
            following = int(value) if value else following
            numbers[following] = label
            following += 1
    return numbers


def record(layer: Layer) -> Tensor:
    """The events of one call of the forward kernel, after two that warm up: int64 [blocks, events, (time, kind)].

    Raises BenchError if the kernel cannot run the layer.
    """
    call = layer.call()
    reason = unsupported_reason(call, "hopper") or ("it has several ranks" if layer.ranks.size > 1 else None)
    if reason:
        raise BenchError(f"a timeline is of the hopper kernel on one rank, and here {reason}")
    blocks = torch.cuda.get_device_properties(layer.x.device).multi_processor_count
    for _ in range(3):
        trace = torch.zeros(blocks, TRACE_EVENTS, 2, dtype=torch.int64, device=layer.x.device)
        provider.run(call, trace=trace)
        torch.cuda.synchronize()
    return trace.cpu()


def spans(trace: Tensor) -> list[Span]:
    """The spans between each block's events. Zeros are events that did not happen."""
    events, phases = header_enum("Event"), header_enum("Phase")
    written = trace[:, :, 0] > 0
    begin = int(trace[:, :, 0][written].min())
    found = []
    for block in range(trace.shape[0]):
        before: float | None = None
        for time, kind in sorted(trace[block][written[block]].tolist()):
            at = (time - begin) / 1e3
            event, phase = events[kind & 0xFF], phases.get(kind >> 8, "")
            if before is not None and at > before:
                name = CLOSES.get(event, event.lower().replace("_", " "))
                found.append(Span(block, name.format(phase=PHASES.get(phase, phase.lower())), before, at))
            before = at
    return found


def chrome(found: Sequence[Span], title: str) -> dict[str, Any]:
    """The spans as a trace that Perfetto and chrome://tracing open: a track for each block."""
    blocks = sorted({span.block for span in found})
    entries: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}]
    entries += [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": block, "args": {"name": f"block {block}"}}
        for block in blocks
    ]
    entries += [
        {"name": s.name, "ph": "X", "pid": 0, "tid": s.block, "ts": s.start, "dur": s.end - s.start} for s in found
    ]
    return {"traceEvents": entries, "displayTimeUnit": "ns"}


def picture(path: Path, found: Sequence[Span], title: str) -> None:
    """Above, a row for each block; below, how many blocks do what."""
    plt = pyplot()
    polygons = importlib.import_module("matplotlib.collections").PolyCollection
    names = list(dict.fromkeys(span.name for span in sorted(found, key=lambda span: span.start)))
    colors = {name: COLORS.get(name, "black") for name in names}
    figure, (rows, shares) = plt.subplots(
        2, 1, sharex=True, figsize=(10, 6), height_ratios=(3, 1.4), layout="constrained"
    )
    for name in names:
        boxes = [
            [(s.start, s.block - 0.5), (s.end, s.block - 0.5), (s.end, s.block + 0.5), (s.start, s.block + 0.5)]
            for s in found
            if s.name == name
        ]
        rows.add_collection(polygons(boxes, facecolors=[colors[name]], label=name, rasterized=True))
    end = max(span.end for span in found)
    at = torch.linspace(0, end, 600)
    counts = [_active([span for span in found if span.name == name], at) for name in names]
    shares.stackplot(at.tolist(), *counts, colors=[colors[name] for name in names])
    rows.set_ylabel("block")
    rows.set_ylim(max(span.block for span in found) + 0.5, -0.5)
    shares.set_ylabel("blocks")
    shares.set_xlabel("microseconds")
    rows.set_xlim(0, end)
    rows.set_title(title, fontsize=10)
    figure.legend(*rows.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _active(some: Sequence[Span], at: Tensor) -> list[int]:
    starts = torch.tensor(sorted(span.start for span in some))
    ends = torch.tensor(sorted(span.end for span in some))
    return (torch.searchsorted(starts, at, right=True) - torch.searchsorted(ends, at, right=True)).tolist()


def check_trace(path: Path) -> None:
    """Raises BenchError if no timeline can be written there."""
    if path.suffix == ".json":
        return
    if path.suffix not in SUFFIXES:
        raise BenchError(
            f"{str(path)!r} is no timeline's name; it must end in .json (for Perfetto), {', '.join(SUFFIXES)}"
        )
    check_picture(path)


def write(path: Path, found: Sequence[Span], title: str) -> None:
    """The timeline as a trace (.json) or as a picture."""
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome(found, title)))
    else:
        picture(path, found, title)
