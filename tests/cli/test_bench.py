"""`mokfx bench` from end to end on small layers, and a sentence for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mokfx.cli import main

QUICK = ["64,48,8,2,40", "--device", "cpu", "--calls", "1", "--groups", "2"]


def test_tables_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    outputs = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    variants = ["--variants", "mok,eager,grouped_mm,sonic-moe"]
    assert main(["bench", *QUICK[:1], "32,32,4,1,9", *QUICK[1:], *variants, *outputs, "--backward"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert "forward and backward, 1 calls back to back, median of 2 such" in said.out
    titles = [i for i, line in enumerate(lines) if " a rank" in line]
    assert len(titles) == 2 and "H 64, I 48, E 8, k 2, T 40" in lines[titles[0]]
    assert [line.split()[0] for line in lines[titles[0] + 1 : titles[1]]] == [
        "variant",
        "mok",
        "eager",
        "grouped_mm",
        "sonic-moe",
    ]
    assert "mokfx bench: [2/2] 32,32,4,1,9: eager ... " in said.err
    found = json.loads((tmp_path / "b.json").read_text())
    assert [row["variant"] for row in found["results"]] == ["mok", "eager", "grouped_mm", "sonic-moe"] * 2
    assert found["protocol"]["backward"] and found["results"][0]["timing"]["median"] > 0
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_two_ranks_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "mokfx.cli", "bench", *QUICK, "--variants", "eager,mok"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("H 64, I 48, E 8, k 2, T 40 a rank") == 1, "only rank 0 prints"
    assert "2 ranks" in process.stdout and "GB/s to other ranks" in process.stdout
    assert "provider reference" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["qwen4"], "'qwen4' is neither a layer (qwen3-30b, "),
        (["--variants", "eager,fast", *QUICK], "there is no variant 'fast'; there are eager, inductor, mok, "),
        (["--plot", "bars.txt", *QUICK], "'bars.txt' is no picture's name"),
        (["--trace", "time.txt", *QUICK], "'time.txt' is no timeline's name"),
        (["--json", "nowhere/b.json", *QUICK], "there is no folder 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mokfx: ") and said.count("\n") == 1 and sentence in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_what_to_do_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "olmoe"]) == 2
    assert "torch sees no CUDA GPU; --device cpu" in capsys.readouterr().err


def test_a_wrong_variant_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mokfx.bench.truth.WITHIN", 1e-9)
    assert main(["bench", *QUICK, "--variants", "mok"]) == 1
    assert "WRONG or broken, not timed: y is off by" in capsys.readouterr().out
