"""What one op of the program computes in several steps: the op's result is what the graph has, not the steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import Layer, inputs, seeded
from .support import assert_no_farther, compiled, run

BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "silu": F.silu,
}


class After(nn.Module):
    """A layer that reads what an op made; in bf16 `rms_norm` computes in fp32 and rounds at its end."""

    def __init__(self, op: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.op, self.layer = op, Layer(dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(BEFORE[self.op](x))
        return y


@pytest.mark.parametrize("op", BEFORE)
def test_a_layer_reads_what_an_op_made(op: str) -> None:
    layer = seeded(lambda: After(op, torch.bfloat16))
    exact = seeded(lambda: After(op, torch.bfloat16)).double()
    x = inputs(8, dtype=torch.bfloat16)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    assert [miss.reason for miss in record.outcome.misses] == []
    assert len(record.calls) == 1
    assert_no_farther(got, run(layer, layer, x), run(exact, exact, x.detach().double().requires_grad_()))
