"""SwiGLU between limits: silu of a gate that is at most L, times an up within L; other limits are another function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor

from .models import inputs, seeded
from .support import assert_same, compiled, run
from .test_vanish import SCORES, Dense

Hidden = Callable[[Tensor, Tensor], Tensor]
LIMITED: dict[str, Hidden] = {
    "silu": lambda g, u: F.silu(g.clamp(max=1.5)) * u.clamp(-1.5, 1.5),
    "sigmoid": lambda g, u: u.clamp(-1.5, 1.5) * g.clamp(max=1.5) * g.clamp(max=1.5).sigmoid(),
    "one side at a time": lambda g, u: F.silu(g.clamp_max(1.5)) * u.clamp(min=-1.5, max=1.5),
}
OTHERS: dict[str, Hidden] = {
    "a gate limited below": lambda g, u: F.silu(g.clamp(-1.5, 1.5)) * u.clamp(-1.5, 1.5),
    "another limit": lambda g, u: F.silu(g.clamp(max=1.5)) * u.clamp(-1.0, 1.0),
    "not centred": lambda g, u: F.silu(g.clamp(max=1.5)) * u.clamp(-1.0, 1.5),
    "up limited above": lambda g, u: F.silu(g.clamp(max=1.5)) * u.clamp(max=1.5),
    "up not limited": lambda g, u: F.silu(g.clamp(max=1.5)) * u,
    "gate not limited": lambda g, u: F.silu(g) * u.clamp(-1.5, 1.5),
    "limited after": lambda g, u: F.silu(g).clamp(max=1.5) * u.clamp(-1.5, 1.5),
    "the sigmoid of another": lambda g, u: u.clamp(-1.5, 1.5) * g * g.clamp(max=1.5).sigmoid(),
    "one gate too many": lambda g, u: F.silu(g.clamp(max=1.5)) * u.clamp(-1.5, 1.5) * g.clamp(max=1.5),
}


class Limited(Dense):
    """Experts with an activation between limits."""

    def __init__(self, activation: Hidden) -> None:
        super().__init__(SCORES["softmax"])
        self.activation = activation

    def hidden(self, rows: Tensor) -> Tensor:
        return self.activation(rows @ self.gate, rows @ self.up)


@pytest.mark.parametrize("activation", LIMITED.values(), ids=LIMITED)
def test_limited(activation: Hidden) -> None:
    layer, x = seeded(lambda: Limited(activation)), inputs(16)
    with compiled(layer) as (function, record):
        got = run(function, layer, x)
    (match,) = record.outcome.matches
    assert match.experts.startswith("limited_swiglu")
    assert_same(got, run(layer, layer, x))


@pytest.mark.parametrize("activation", OTHERS.values(), ids=OTHERS)
def test_other_limits_are_left_alone(activation: Hidden) -> None:
    layer = seeded(lambda: Limited(activation))
    with compiled(layer) as (function, record):
        function(inputs(16))
    assert not record.outcome.matches and record.outcome.misses
