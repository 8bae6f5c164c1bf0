"""The table and the JSON of given results."""

from __future__ import annotations

import json
from pathlib import Path

import expecttest
import pytest

from mokfx.bench.errors import BenchError
from mokfx.bench.floor import Ceilings, floor
from mokfx.bench.measure import Timing
from mokfx.bench.plot import check_picture, plot
from mokfx.bench.report import as_json, heading, table
from mokfx.bench.run import Protocol, Result
from mokfx.bench.shapes import SHAPES

CEILINGS = Ceilings(700e12, 4.2e12, 380e9)
SHAPE = SHAPES["qwen3-30b"]
FLOOR = floor(SHAPE, 2, CEILINGS, backward=False)
FACTS = {"card": "NVIDIA H200", "ranks": 2, "torch": "2.13.0", "cuda": "13.0", "kernels": "0123"}
RESULTS = [
    Result(SHAPE, "eager", Timing(4.12, 4.0, 4.4), errors={"y": 4.1e-3, "a row of y": 5.2e-3}, floor=FLOOR),
    Result(SHAPE, "inductor", Timing(4.49, 4.4, 5.0), errors={"y": 4.1e-3}, floor=FLOOR),
    Result(SHAPE, "mok", Timing(1.41, 1.40, 1.45), note="provider hopper", errors={"y": 2.9e-3}, floor=FLOOR),
    Result(SHAPE, "grouped_mm", Timing(1.27, 1.2, 1.3), floor=FLOOR),
    Result(SHAPE, "sonic-moe", reason="it runs on one GPU"),
    Result(SHAPE, "moe-ops", reason="y is off by 1.4 of its norm, and at most 0.01 is right", failed=True),
]


class Tables(expecttest.TestCase):
    def test_heading(self) -> None:
        self.assertExpectedInline(
            heading(FACTS, CEILINGS, Protocol()),
            """\
NVIDIA H200, torch 2.13.0, CUDA 13.0, 2 ranks, a time is the slowest's
forward, 10 calls back to back, median of 20 such
measured here: dense bf16 product 700 TFLOP/s, copy in memory 4.2 TB/s, 380 GB/s to other ranks""",
        )

    def test_table(self) -> None:
        self.assertExpectedInline(
            table(RESULTS, backward=False),
            """\
qwen3-30b: H 2048, I 768, E 128, k 8, T 8192 a rank; floor 0.884 ms, by products
  variant               ratio        ms   fastest   slowest  TFLOP/s  of floor     error
  eager                 1.00x     4.120     4.000     4.400      150       21%   5.2e-03
  inductor              0.92x     4.490     4.400     5.000      138       20%   4.1e-03
  mok                   2.92x     1.410     1.400     1.450      439       63%   2.9e-03  provider hopper
  grouped_mm            3.24x     1.270     1.200     1.300      487       70%
  sonic-moe             not available: it runs on one GPU
  moe-ops               WRONG or broken, not timed: y is off by 1.4 of its norm, and at most 0.01 is right""",
        )

    def test_without_plain_there_are_no_ratios(self) -> None:
        self.assertExpectedInline(
            table(RESULTS[2:3], backward=False),
            """\
qwen3-30b: H 2048, I 768, E 128, k 8, T 8192 a rank; floor 0.884 ms, by products
  variant               ratio        ms   fastest   slowest  TFLOP/s  of floor     error
  mok                             1.410     1.400     1.450      439       63%   2.9e-03  provider hopper""",
        )


def test_json_has_every_figure() -> None:
    found = json.loads(json.dumps(as_json(FACTS, CEILINGS, Protocol(), [RESULTS])))
    assert found["machine"]["card"] == "NVIDIA H200" and found["ceilings"]["link"] == 380e9
    assert found["protocol"] == {"backward": False, "calls": 10, "groups": 20, "seed": 0}
    mok = found["results"][2]
    assert mok["ratio"] == pytest.approx(4.12 / 1.41) and mok["timing"]["median"] == 1.41
    assert mok["tflops"] == pytest.approx(SHAPE.flops / 1.41e9) and mok["errors"] == {"y": 2.9e-3}
    assert mok["of_floor"] == pytest.approx(FLOOR.milliseconds / 1.41)
    assert found["results"][5]["failed"] and "ratio" not in found["results"][5]


def test_with_a_backward_three_times_as_much_is_counted() -> None:
    assert RESULTS[0].tflops(backward=True) == pytest.approx(3 * RESULTS[0].tflops(backward=False))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"bars{suffix}"
    plot(path, [RESULTS, RESULTS[:3]], CEILINGS, False, "a title")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml") and len(data) > 5000


def test_a_picture_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"is no picture's name; it must end in \.png"):
        check_picture(tmp_path / "bars.gif")


def test_without_matplotlib_what_to_install_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"pip install 'mokfx\[bench\]'"):
        check_picture(Path("bars.png"))
