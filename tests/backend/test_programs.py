"""The programs that a newcomer runs: the console script, the demo, the examples, the benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import mokfx.demo
from mokfx import demo_ranks, demo_steps

ROOT = Path(__file__).parent.parent.parent


def run(*command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def test_version_and_help() -> None:
    assert run("-m", "mokfx.cli", "--version").stdout == f"mokfx {version('mokfx')}\n"
    assert "demo" in run("-m", "mokfx.cli", "--help").stdout
    process = run("-m", "mokfx.cli", "demo", "--ranks", "3")
    assert process.returncode == 2
    assert "invalid choice: 3" in process.stderr


def test_demo() -> None:
    process = run("-m", "mokfx.cli", "demo", "--steps", "3")
    assert process.returncode == 0, process.stdout + process.stderr
    one, several = process.stdout.split("2 ranks:")
    for part in (one, several):
        assert "1 MoE layer became mok.moe" in part
        assert part.count("torch.ops.mok.moe") == 1
        assert "grad moe.experts.1.down.weight" in part
        assert "   3   " in part
    assert "rank 1: the same checks passed" in several
    assert process.stdout.splitlines()[-1].startswith("All equal to eager, in ")


def test_demo_fails_if_compiled_and_eager_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_steps, "TOLERANCE", -1.0)
    assert mokfx.demo.run(ranks=1, steps=1) == 1
    assert "mokfx demo failed: compiled differs from eager by more than" in capsys.readouterr().err


def test_demo_fails_if_a_rank_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(mokfx.demo, "demonstrate", lambda steps, seed: None)
    monkeypatch.setattr(demo_ranks, "MODULE", "mokfx.no_such_module")
    assert mokfx.demo.run(ranks=2, steps=1) == 1
    error = capsys.readouterr().err
    assert "mokfx demo failed: on rank " in error
    assert "No module named mokfx.no_such_module" in error


def test_quickstart() -> None:
    process = run("examples/quickstart.py")
    assert process.returncode == 0, process.stderr
    assert "1 MoE layer became mok.moe" in process.stdout
    assert "step 20  loss" in process.stdout


def test_expert_parallel() -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = run(*command, "examples/expert_parallel.py")
    assert process.returncode == 0, process.stderr
    assert "1 MoE layer became mok.moe" in process.stdout
    assert "2 ranks of group" in process.stdout
    assert "rank 1: 24 tokens" in process.stdout


def test_pin_a_match() -> None:
    process = run("examples/pin_a_match.py")
    assert process.returncode == 0, process.stderr


def test_benchmark() -> None:
    process = run("benchmarks/pass_time.py", "--layers", "1", "--experts", "2", "--compiler", "aot_eager")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("ratio 0.")
