"""DeepSpeed's MoE layer: what becomes of each gate, and training beside eager."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import mokfx

from .check import check_row
from .deepspeed_rows import DROPPING, ROWS, FeedForward, layer
from .row import Row
from .table import assert_in_table

pytest.importorskip("deepspeed")

STEPS = 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.ranks}")
def test_row(row: Row) -> None:
    assert_in_table(row, check_row(row))


def test_auxiliary_loss_and_counts_stay_outputs() -> None:
    case = layer(4, DROPPING, FeedForward, torch.float64)
    compiled = mokfx.compile(case.model, options={"mok.compiler": "eager", "mok.on_miss": "raise"})
    y, auxiliary, counts = compiled(*case.args)
    assert y.shape == case.args[0].shape and auxiliary.requires_grad and int(counts.sum()) == 4 * 24
    auxiliary.backward()
    assert case.model.deepspeed_moe.gate.wg.weight.grad.any()


def losses(function: nn.Module, model: nn.Module, x: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(STEPS):
        y, auxiliary, _ = function(x)
        loss = (y - 1).square().mean() + 0.01 * auxiliary
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("k", [1, 4])
def test_training_beside_eager(k: int) -> None:
    case = layer(k, DROPPING, FeedForward, torch.float64)
    eager, model, x = copy.deepcopy(case.model), case.model, case.args[0].detach()
    wanted = losses(eager, eager, x)
    torch._dynamo.reset()
    compiled = mokfx.compile(model, options={"mok.compiler": "aot_eager", "mok.on_miss": "raise"})
    got = losses(compiled, model, x)
    print(f"k={k}: eager {wanted}, mok {got}")
    assert got[-1] < got[0]
    assert all(math.isclose(a, b, rel_tol=1e-8) for a, b in zip(got, wanted, strict=True))


def test_example() -> None:
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "examples/deepspeed_moe.py"]
    process = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "1 MoE layer became mok.moe" in process.stdout
    found = [float(line.split("loss ")[1].split(",")[0]) for line in process.stdout.splitlines() if "loss " in line]
    assert len(found) == 5 and found[-1] < found[0]
