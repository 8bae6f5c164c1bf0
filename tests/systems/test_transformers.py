"""Hugging Face transformers: its MoE layers become one `mok.moe` each, and its models train and generate as before."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mokfx

from ..ranks import run_ranks
from .check import check_row, compare, reports, results, verdict_of
from .row import Case, Row
from .table import assert_in_table
from .transformers_blocks import distributed_block
from .transformers_models import build_model, language_model
from .transformers_rows import ROWS

pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent.parent
AOT = {"mok.compiler": "aot_eager"}
TRAINED = ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"]
WHOLE = {"options": AOT, "fullgraph": True}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row: Row) -> None:
    assert_in_table(row, check_row(row))


def steps(function: Callable[..., Any], model: Any, number: int = 10) -> list[float]:
    """The losses of some optimiser steps on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(24).view(2, 12) * 7 % 61 + 3
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = function(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", TRAINED)
def test_trains_as_eager_does(name: str) -> None:
    model = build_model(name, torch.float32)
    twin = copy.deepcopy(model)
    eager = steps(model, model)
    with reports() as seen:
        compiled = steps(mokfx.compile(twin, **WHOLE), twin)
    print(name, *(f"{a:.5f}/{b:.5f}" for a, b in zip(eager, compiled, strict=True)), sep="  ")
    # AOTAutograd may ask for another attempt at the same graph, without floats that it took for inputs.
    assert seen and all(len(report.matches) == 2 and not report.misses for report in seen)
    assert eager[-1] < 0.9 * eager[0]
    assert compiled == pytest.approx(eager, rel=2e-4)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
def test_generates_as_eager_does(experts: str) -> None:
    """With a cache that grows: a prompt, then token by token, in graphs for any length."""
    torch._dynamo.reset()  # other tests compile the same code for other models, up to Dynamo's limit
    model = build_model("MixtralForCausalLM", torch.float32, output_router_logits=False).eval()
    model.config._experts_implementation = experts
    prompt = torch.arange(10).view(2, 5) * 5 % 61 + 3
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(prompt, **settings)
    model.forward = mokfx.compile(model.forward, options={"mok.compiler": "eager"}, dynamic=True)
    with reports() as seen:
        got = model.generate(prompt, **settings)
    assert torch.equal(got, expected)
    assert seen and all(len(report.matches) == 2 and not report.misses for report in seen)


def layers_checkpointed(**arguments: Any) -> Case:
    # Router logits would be noted in a list, which Dynamo does not allow under a checkpoint.
    case = language_model("Qwen3MoeForCausalLM", torch.float32, output_router_logits=False)
    case.model.train()
    case.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False, **arguments})
    return case


def keep_products() -> Any:
    """Selective: what matrix products give is saved, the rest is computed again."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.bmm.default])


@pytest.mark.parametrize("selective", [False, True], ids=["full", "selective"])
def test_under_checkpoints(selective: bool) -> None:
    build = partial(layers_checkpointed, **({"context_fn": keep_products} if selective else {}))
    report = compare(build(), 1e-4, build(), **WHOLE)
    assert verdict_of(report, 2).matched, report


class UnderAutocast(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, enabled: bool) -> None:
        super().__init__()
        self.model, self.enabled = model, enabled

    def forward(self, **inputs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.model(**inputs).loss


def autocast_model(enabled: bool = True) -> Case:
    case = language_model("MixtralForCausalLM", torch.float32)
    return Case(UnderAutocast(case.model, enabled), (), case.kwargs, moe_layers=2)


def test_under_autocast() -> None:
    """Each gradient is at most twice as far from float32's as that of eager code under autocast."""
    case, plain, again = autocast_model(), autocast_model(enabled=False), autocast_model()
    compiled = mokfx.compile(again.model, options={"mok.compiler": "eager"}, fullgraph=True)
    with reports() as seen:
        got = results(compiled, again)
    assert [len(report.matches) for report in seen] == [2]
    eager, exact = results(case.model, case), results(plain.model, plain)
    for name, best in exact.items():
        if isinstance(best, Tensor) and best.is_floating_point():
            error, allowed = (float((run[name].double() - best.double()).detach().norm()) for run in (got, eager))
            assert error <= 2 * allowed + 1e-3 * float(best.detach().double().norm()), name


def exchanges(rank: int) -> tuple[str, str, int]:
    """How experts exchange tokens before and after `mokfx.compile`; graphs of plain torch.compile with "mok"."""

    def name(block: Any) -> str:
        found = inspect.getclosurevars(block.experts.forward).nonlocals["implementation"]
        return type(found.all_to_all).__name__

    case = distributed_block("MixtralSparseMoeBlock", "grouped_mm", "auto", torch.float32)
    before = name(case.model)
    mokfx.compile(case.model)
    named = distributed_block("MixtralSparseMoeBlock", "grouped_mm", "mok", torch.float32)
    with reports() as seen:
        torch.compile(named.model, backend="mok", fullgraph=True, options={"mok.compiler": "eager"})(*named.args)
    return before, name(case.model), sum(len(report.matches) for report in seen)


def test_compile_chooses_the_exchange_without_a_branch() -> None:
    assert run_ranks(2, exchanges) == [("AllToAllEP", "BranchFreeEP", 1)] * 2


def sharded(rank: int, number: int) -> tuple[list[float], list[float], list[int]]:
    """Losses of a model that FSDP2 shards and whose experts are on two ranks, eager and compiled by the layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    def built() -> Any:
        model = build_model("Qwen3MoeForCausalLM", torch.float32, output_router_logits=False)
        meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
        plan = model._expand_parallel_plan(dict(model.ep_plan))
        model = apply_expert_parallelism(model, meshes["ep"], meshes["tp"], plan)
        experts = {p for name, p in model.named_parameters() if ".experts." in name}
        for layer in model.model.layers:
            fully_shard(layer, mesh=meshes["ep"], ignored_params=experts)
        fully_shard(model, mesh=meshes["ep"], ignored_params=experts)
        return model

    eager = steps_of_rank(rank, built(), number)
    model = built()
    for layer in model.model.layers:
        layer.forward = mokfx.compile(layer.forward, options=AOT)
    with reports() as seen:
        compiled = steps_of_rank(rank, model, number)
    return eager, compiled, [len(report.matches) for report in seen]


def steps_of_rank(rank: int, model: Any, number: int) -> list[float]:
    """The losses of some optimiser steps, on other tokens on each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = (torch.arange(24).view(2, 12) * 7 + 11 * rank) % 61 + 3
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_with_fsdp2_and_experts_on_two_ranks() -> None:
    for eager, compiled, matches in run_ranks(2, sharded, 10, timeout=300):
        print(*(f"{a:.5f}/{b:.5f}" for a, b in zip(eager, compiled, strict=True)), sep="  ")
        assert matches == [1, 0]  # both MoE layers run one graph, and the dense layer between them another
        assert eager[-1] < eager[0]
        assert compiled == pytest.approx(eager, rel=2e-4)


def test_example() -> None:
    program = ROOT / "examples" / "transformers_qwen3_moe.py"
    assert len(program.read_text().splitlines()) < 60
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "2 MoE layers became mok.moe (1 graph" in run.stdout
    assert "step 9" in run.stdout
