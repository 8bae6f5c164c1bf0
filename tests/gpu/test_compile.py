"""A model compiled with the backend on an H100 or H200: its layer runs in the kernel, or is left alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from torch._dynamo.utils import counters

from mokfx.backend import mok
from mokfx.ops import configure

pytestmark = pytest.mark.gpu


class MoE(nn.Module):
    """Top-k of SwiGLU experts in the way of many models: sort by expert, loop, unsort, weigh, sum."""

    def __init__(self, hidden: int, inner: int, experts: int, choices: int) -> None:
        super().__init__()
        self.experts, self.choices = experts, choices
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate = nn.ModuleList(nn.Linear(hidden, inner, bias=False) for _ in range(experts))
        self.up = nn.ModuleList(nn.Linear(hidden, inner, bias=False) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(inner, hidden, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = F.softmax(self.router(x), dim=-1).topk(self.choices)
        slots = ids.flatten()
        order = slots.argsort(stable=True)
        counts = F.one_hot(slots, self.experts).sum(0).tolist()
        outputs = []
        for e, rows in enumerate(x[order // self.choices].split(counts)):
            outputs.append(self.down[e](F.silu(self.gate[e](rows)) * self.up[e](rows)))
        outputs = torch.cat(outputs)[order.argsort()].view(-1, self.choices, x.shape[-1])
        return (outputs * weights.unsqueeze(-1)).sum(1)


@pytest.fixture
def model() -> MoE:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    return MoE(256, 128, 8, 2).to("cuda", torch.bfloat16)


def close(y: Tensor, expected: Tensor) -> bool:
    return bool((y.float() - expected.float()).norm() <= 1e-2 * expected.float().norm())


def test_inference_runs_in_the_kernel_without_a_sync(model: MoE) -> None:
    compiled = torch.compile(model, backend=mok, fullgraph=True)
    x = torch.randn(500, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert close(compiled(x), model(x))
        assert (counters["mok"]["matched"], counters["mok"]["missed"]) == (1, 0)
        torch.cuda.set_sync_debug_mode("error")  # eager would wait for the counts
        y = compiled(x)
        torch.cuda.set_sync_debug_mode("default")
        assert close(y, model(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert close(y, model(x))


def gradients(model: MoE, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    run(x).float().square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(gradient is not None for gradient in found)
    return [gradient.float().clone() for gradient in found if gradient is not None]


def test_training_runs_in_the_kernels_with_gradients_as_good_as_eagers(model: MoE) -> None:
    compiled = torch.compile(model, backend=mok, fullgraph=True)
    x = torch.randn(500, 256, device="cuda", dtype=torch.bfloat16)
    ours, again = gradients(model, compiled, x), gradients(model, compiled, x)
    assert (counters["mok"]["matched"], counters["mok"]["missed"]) == (1, 0)
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))
    eager = gradients(model, model, x)
    wide = copy.deepcopy(model).float()
    exact = gradients(wide, wide, x.float())
    router = 1  # x, then the router: its choices may differ in bf16, so what it gets is compared with eager's
    for i, (one, plain, truth) in enumerate(zip(ours, eager, exact, strict=True)):
        error, allowed = float((one - truth).norm()), 1.5 * float((plain - truth).norm())
        assert error <= allowed or i == router, (i, error, allowed)


def test_pre_activations_computed_again_give_the_same_bits_and_keep_less(model: MoE) -> None:
    x = torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16)
    found, kept = [], []
    try:
        for recompute in (False, True):
            torch._dynamo.reset()
            backend = functools.partial(mok, options={"mok.recompute": recompute})
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            gradients(model, compiled, x)
            before = torch.cuda.memory_allocated()
            y = compiled(x)
            kept.append(torch.cuda.memory_allocated() - before)
            del y
            found.append(gradients(model, compiled, x))
    finally:
        configure(recompute=False)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    rows = 2048 * 2 + 8 * 64
    assert kept[0] - kept[1] == 2 * rows * 128 * 2, "gate and up of every sorted row, and no more"


def test_cuda_graphs_of_inductor(model: MoE) -> None:
    compiled = torch.compile(model, backend=functools.partial(mok, mode="reduce-overhead"), fullgraph=True)
    with torch.no_grad():
        for _ in range(5):  # warms up, captures, replays
            x = torch.randn(500, 256, device="cuda", dtype=torch.bfloat16)
            assert close(compiled(x).clone(), model(x))
    assert (counters["mok"]["matched"], counters["inductor"]["cudagraph_skips"]) == (1, 0)


def test_twenty_steps_beside_eager(model: MoE) -> None:
    x, target = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    losses = []
    for backend in (None, mok):
        trained = copy.deepcopy(model)
        run = trained if backend is None else torch.compile(trained, backend=backend, fullgraph=True)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        for _ in range(20):
            loss = (run(x) - target).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=2e-2) and losses[1] < 0.98


def test_what_the_backward_cannot_do_is_left_alone_in_training_alone() -> None:
    from mokfx.ops import Call, unsupported_reason
    from tests.ops.cases import Case, build

    inputs = build(Case(hidden=64, inner=64, weight_on="input", dtype=torch.bfloat16)).map(lambda tensor: tensor.cuda())
    call = Call(*inputs.args, **inputs.settings)
    assert unsupported_reason(call) is None
    call.x.requires_grad_()
    assert "gradients" in (unsupported_reason(call) or "")
