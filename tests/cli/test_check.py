"""`mokfx check`: its exit codes, its JSON, and ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline

from mokfx.cli import main

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
MODELS = "tests.check.models"


def test_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{MODELS}:good"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("bfloat16; 1 MoE layer became mok.moe\n")
    assert "\ngood: no error is more than 3 units" in printed.out
    steps = [line.partition(" ...")[0] for line in printed.err.splitlines() if line.startswith("mokfx")]
    assert_expected_inline(
        "\n".join(steps),
        """\
mokfx check: eager
mokfx check: traced
mokfx check: compiled
mokfx check: compiled and run again
mokfx check: in float64""",
    )


def test_a_tolerance_of_less_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{MODELS}:good", "--tolerance", "0.01", "--json", "--no-grad"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    (rank,) = said["ranks"]
    assert [c["name"] for c in rank["comparisons"]] == ["output"]
    assert rank["problems"] == ["output is more than 0.01 units from float64"]


def test_no_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{MODELS}:without_moe"]) == 1
    assert "no MoE layer was rewritten" in capsys.readouterr().out


@pytest.mark.parametrize(("factory", "code"), [("fails", 2), ("fails_compiled", 1), ("nothing", 2)])
def test_mistakes_are_one_line(factory: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{MODELS}:{factory}"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    EXPECTED[factory](textwrap.fill(said.err.splitlines()[-1], 100))


EXPECTED: dict[str, Callable[[str], None]] = {
    "fails": lambda line: assert_expected_inline(
        line,
        """\
mokfx: the model, eager, raised RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x33 and
32x4) (at demo_model.py:66 `weights, ids = self.router(x).softmax(-1).topk(self.top_k)`)""",
    ),
    "fails_compiled": lambda line: assert_expected_inline(
        line,
        """\
mokfx check: not good: the model, compiled, raised NotImplementedError: not today (at models.py:66
`raise NotImplementedError("not today")`); eager it did not""",
    ),
    "nothing": lambda line: assert_expected_inline(
        line,
        """\
mokfx: tests.check.models has no 'nothing'; its functions: layer, tokens, compiled, good,
without_moe, fails, fails_compiled, broken""",
    ),
}


def test_under_torchrun_each_rank_runs_and_the_first_prints() -> None:
    process = subprocess.run(
        [*TORCHRUN, "-m", "mokfx.cli", "check", f"{MODELS}:good"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("rank 0 of 2:\nbfloat16; 1 MoE layer became mok.moe\n")
    assert "\n\nrank 1 of 2:\ngood: " in process.stdout
    assert process.stderr.count("mokfx check: eager ...") == 1
