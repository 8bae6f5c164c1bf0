"""A model compiled with the backend on an H100 or H200: its layer runs in the kernel, or is left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from torch._dynamo.utils import counters

from mokfx.backend import mok

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


def test_training_leaves_the_layer_alone_with_a_reason(model: MoE) -> None:
    compiled = torch.compile(model, backend=mok, fullgraph=True)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    y = compiled(x)
    assert close(y, model(x))
    assert (counters["mok"]["matched"], counters["mok"]["missed"]) == (0, 1)
    y.float().square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
