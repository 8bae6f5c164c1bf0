"""A process of test_cache.py: compile the op, run it forward and backward, print what the caches did.

python cache_child.py salted|unsalted
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import mokfx.backend

if sys.argv[1] == "unsalted":
    mokfx.backend.salted = lambda patches, salt: dict(patches)


def moe(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    # The op itself, and no other, so that nothing has to be compiled in C++.
    return torch.ops.mok.moe(x, ids, weights, [], [up], [down], num_experts=4, activation="relu")


torch.manual_seed(0)
x, up, down = (torch.randn(shape).double() for shape in ((6, 8), (4, 8, 12), (4, 12, 8)))
ids, weights = torch.arange(12).view(6, 2) % 4, torch.rand(6, 2).double()
x.requires_grad_()
torch.compile(moe, backend="mok")(x, ids, weights, up, down).sum().backward()
assert x.grad is not None
print(
    json.dumps(
        {
            "package": mokfx.__file__,
            "hits": counters["aot_autograd"]["autograd_cache_hit"],
            "misses": counters["aot_autograd"]["autograd_cache_miss"],
            "bypasses": counters["aot_autograd"]["autograd_cache_bypass"],
            "gradient": x.grad.norm().item(),
        }
    )
)
