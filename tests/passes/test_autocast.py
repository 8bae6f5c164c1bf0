"""Under autocast a layer of fp32 weights computes in bf16: the call has its dtypes and its accuracy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .models import Layer, inputs, seeded
from .support import assert_no_farther, compiled, run


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(dtype=torch.float32)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x, ids)


def test_autocast_inside() -> None:
    ids = torch.tensor([[0, 1], [2, 1], [3, 0], [1, 2], [0, 3], [2, 0]])
    model = seeded(Autocast)
    x = inputs(6, dtype=torch.float32)
    with compiled(model) as (function, record):
        got = run(function, model, x, ids)
    eager = run(model, model, x, ids)
    exact_model = seeded(Autocast).double()
    exact = run(exact_model.layer, exact_model, x.detach().double().requires_grad_(), ids)
    assert len(record.outcome.matches) == 1, record.outcome.misses
    assert got.outputs[0].dtype == eager.outputs[0].dtype
    assert_no_farther(got, eager, exact)
