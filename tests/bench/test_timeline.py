"""Events become spans, a Chrome trace and a picture. The events here are made up; tests/gpu has the kernel's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mokfx.bench.errors import BenchError
from mokfx.bench.timeline import CLOSES, PHASES, Span, check_trace, chrome, header_enum, record, spans, write

from .layers import small


def events(*blocks: list[tuple[int, str, str]]) -> Tensor:
    """A trace as the kernel writes it: thread 0's events in the first 8 places, the others' after them."""
    kinds = {name: number for number, name in header_enum("Event").items()}
    phases = {name: number for number, name in header_enum("Phase").items()}
    trace = torch.zeros(len(blocks), 32, 2, dtype=torch.int64)
    for block, entries in enumerate(blocks):
        early = [entry for entry in entries if entry[1] in ("STARTED", "COUNTED", "PLACED")]
        late = [entry for entry in entries if entry not in early]
        for first, some in ((0, early), (8, late)):
            for i, (time, kind, phase) in enumerate(some):
                trace[block, first + i] = torch.tensor([time, phases.get(phase, 0) << 8 | kinds[kind]])
    return trace


TRACE = events(
    [
        (1_000_000, "STARTED", ""),
        (1_003_000, "COUNTED", ""),
        (1_010_000, "PLACED", ""),
        (1_010_500, "TILE_BEGIN", "UP"),
        (1_030_500, "TILE_MULTIPLIED", "UP"),
        (1_031_000, "TILE_STORED", "UP"),
        (1_031_000, "TILE_BEGIN", "DOWN"),
        (1_041_000, "TILE_MULTIPLIED", "DOWN"),
        (1_042_000, "TILE_STORED", "DOWN"),
        (1_050_000, "ALL_STORED", ""),
        (1_060_000, "COMBINED", ""),
    ],
    [(1_000_250, "STARTED", ""), (1_003_000, "COUNTED", "")],
)


def test_the_headers_enums_are_read() -> None:
    assert set(CLOSES) | {"STARTED"} <= set(header_enum("Event").values())
    assert header_enum("Event")[1] == "STARTED", "0 must mean that nothing was written"
    assert set(PHASES) <= set(header_enum("Phase").values())


def test_a_span_ends_at_each_event() -> None:
    assert spans(TRACE) == [
        Span(0, "count", 0.0, 3.0),
        Span(0, "place", 3.0, 10.0),
        Span(0, "wait", 10.0, 10.5),
        Span(0, "gate/up", 10.5, 30.5),
        Span(0, "gate/up, epilogue", 30.5, 31.0),
        Span(0, "down", 31.0, 41.0),
        Span(0, "down, epilogue", 41.0, 42.0),
        Span(0, "wait", 42.0, 50.0),
        Span(0, "combine", 50.0, 60.0),
        Span(1, "count", 0.25, 3.0),
    ]


def test_the_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    found = spans(TRACE)
    write(tmp_path / "t.json", found, "a layer")
    entries = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert entries[0] == {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "a layer"}}
    assert [entry["args"]["name"] for entry in entries[1:3]] == ["block 0", "block 1"]
    complete = [entry for entry in entries if entry["ph"] == "X"]
    assert len(complete) == len(found)
    assert complete[3] == {"name": "gate/up", "ph": "X", "pid": 0, "tid": 0, "ts": 10.5, "dur": 20.0}
    assert chrome(found, "a layer")["displayTimeUnit"] == "ns"


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"t{suffix}"
    write(path, spans(TRACE), "a layer")
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert path.stat().st_size > 5_000


def test_other_names_are_refused() -> None:
    check_trace(Path("t.json"))
    with pytest.raises(BenchError, match=r"must end in \.json \(for Perfetto\), \.png"):
        check_trace(Path("t.txt"))


def test_without_the_kernel_the_reason_is_told() -> None:
    with pytest.raises(BenchError, match=r"a timeline is of the hopper kernel on one rank, and here .*x is on cpu"):
        record(small())
