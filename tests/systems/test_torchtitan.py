"""torchtitan: its layers and models become one `mok.moe` a layer, and train beside eager under its own parallelize."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from mokfx.backend import mok

from ..ranks import run_ranks
from .check import assert_close, check_row, compare, full, reports
from .row import Case, Row
from .table import assert_in_table
from .torchtitan_layers import built, deepseek_v3_model, deepseek_v3_moe, qwen3_model, tokens, trained
from .torchtitan_rows import ROWS, example

pytest.importorskip("torchtitan.models.common.moe")

STEPS = 10
BF16 = 2e-2
"""How far a layer's results may be from eager's, as a part of their norm: experts compute in bf16 in both."""
DEEP = 4e-2
"""The same for the gradients of a model: its layers round after each other."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.ranks}")
def test_row(row: Row) -> None:
    assert_in_table(row, check_row(row))


def test_a_layer_in_fp32_keeps_its_casts() -> None:
    """Experts compute in bf16 inside of an fp32 layer: the op is given what is cast, and returns fp32."""
    case = Case(built(deepseek_v3_moe(), torch.float32), (example(torch.float32),))
    report = compare(case, BF16)
    assert len(report.matches) == 1 and not report.misses


def test_autocast() -> None:
    layer = built(deepseek_v3_moe(), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = compare(Case(layer, (example(torch.float32),)), BF16)
    assert len(report.matches) == 1 and not report.misses


# -- training ----------------------------------------------------------------------------------------------------------


def steps(model: nn.Module, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of STEPS steps, and the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    ids, positions = tokens(rank)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for _ in range(STEPS):
        logits = model(ids, positions)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if not first:
            named = model.named_parameters()
            first = {plain(name): full(p.grad).clone() for name, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def plain(name: str) -> str:
    """A parameter's name without what checkpoints and compiles put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def quick(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend with the rest of the graph uncompiled, which takes a tenth of the time."""
    return mok(module, inputs, options={"mok.compiler": "aot_eager"})


@dataclass(frozen=True)
class Setup:
    """How torchtitan is told to set a model up."""

    family: str
    ranks: int
    expert_parallel: int = 1
    checkpoint: str = ""
    backend: str = "mok_quick"


def beside_eager(rank: int, setups: Sequence[Setup]) -> list[tuple[str, list[float], list[float]]]:
    """For each setup: how rows are dispatched, and the losses of training in eager and with each block compiled."""
    torch._dynamo.register_backend(quick, name="mok_quick")  # torchtitan's settings take a backend's name
    return [_beside_eager(rank, setup) for setup in setups]


def _beside_eager(rank: int, setup: Setup) -> tuple[str, list[float], list[float]]:
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3
    from torchtitan.models.qwen3 import parallelize_qwen3

    config, parallelize = {
        "qwen3": (qwen3_model, parallelize_qwen3),
        "deepseek_v3": (deepseek_v3_model, parallelize_deepseekv3),
    }[setup.family]
    policy: Any = {"": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[setup.checkpoint]
    torch._dynamo.reset()
    eager, wanted = steps(trained(config, parallelize, setup.expert_parallel, None, policy), rank)
    with reports() as seen:
        got, gradients = steps(trained(config, parallelize, setup.expert_parallel, setup.backend, policy), rank)
    # A graph for the dense block, and one that both MoE blocks share.
    assert [len(report.matches) for report in seen] == [0, 1], [miss.reason for r in seen for miss in r.misses]
    assert not any(report.misses for report in seen)
    assert_close(gradients, wanted, DEEP)
    return seen[1].matches[0].dispatch, eager, got


SETUPS = (
    Setup("deepseek_v3", 2),
    Setup("qwen3", 2, checkpoint="full"),
    Setup("deepseek_v3", 2, checkpoint="selective"),
    Setup("qwen3", 2, expert_parallel=2, backend="mok"),
    Setup("deepseek_v3", 4, expert_parallel=2),
)
"""FSDP in each; with checkpoints; with ExpertParallel over all ranks, and over half of them."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_beside_eager(ranks: int) -> None:
    setups = [setup for setup in SETUPS if setup.ranks == ranks]
    for results in zip(setups, *run_ranks(ranks, beside_eager, setups, timeout=300), strict=True):
        setup = results[0]
        for rank, (dispatch, eager, got) in enumerate(results[1:]):
            print(f"{setup}, rank {rank}: eager {eager}, mok {got}")
            assert ("all-to-all" in dispatch) == (setup.expert_parallel > 1)
            assert got[-1] < got[0]
            for a, b in zip(got, eager, strict=True):
                assert math.isclose(a, b, rel_tol=0.03), (setup, got, eager)


def checkpoint_with_expert_parallel(rank: int, backend: str) -> str:
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.qwen3 import parallelize_qwen3

    model = trained(qwen3_model, parallelize_qwen3, dist.get_world_size(), backend, FullAC.Config())
    try:
        model(*tokens(rank))
    except AssertionError as error:
        return str(error).split(",")[0]
    return ""


def test_checkpoints_with_expert_parallel_are_beyond_torch() -> None:
    """A limit of torch 2.13's AOTAutograd on DTensors under checkpoints, with its own backend too."""
    said = run_ranks(2, checkpoint_with_expert_parallel, "aot_eager")
    assert said == 2 * ["expected all tensors_saved_with_vc_check to be Tensors"]


def test_example() -> None:
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "examples/torchtitan_qwen3.py"]
    process = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "2 MoE layers became mok.moe" in process.stdout
    losses = [float(line.split("loss ")[1]) for line in process.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 5 and losses[-1] < losses[0]
