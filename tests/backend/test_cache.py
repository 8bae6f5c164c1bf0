"""Inductor's caches: untouched for a model without MoE, on and never stale for one with."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

from mokfx.cache import HOOK, Salt, salted

from .models import Dense


class Named(CustomGraphPass):
    """A user's pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ran: list[torch.fx.Graph] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.ran.append(graph)

    def uuid(self) -> Any:
        return self.name


def test_salt_follows_the_user_s_passes() -> None:
    graph = torch.fx.Graph()
    first, second = Named("first"), Named("second")
    for present in ([first, second], (first, second)):
        salt = salted({HOOK: present, "max_autotune": True}, "s")
        assert salt["max_autotune"] is True
        assert salt[HOOK].uuid() == ("first", "second", "s")
        salt[HOOK](graph)
    assert len(first.ran) == len(second.ran) == 2
    assert salted({HOOK: first}, "s")[HOOK].uuid() == ("first", "s")
    assert salted({}, "s")[HOOK].uuid() == ("s",)
    with torch._inductor.config.patch({HOOK: second}):
        assert salted({}, "s")[HOOK].uuid() == ("second", "s")


def test_a_pass_without_a_name_switches_caching_off_as_in_inductor() -> None:
    assert Salt("s", (lambda graph: None,)).uuid() is None


def test_a_model_without_moe_compiles_exactly_as_with_inductor() -> None:
    """In one cache folder, the second of the two backends finds what the first has made."""
    model = Dense().eval()
    x = torch.randn(5, 8)
    with fresh_cache():
        results = []
        for backend in ("inductor", "mok"):
            torch._dynamo.reset()
            counters.clear()
            y = torch.compile(model, backend=backend)(x)
            y.sum().backward()
            results.append((y, [parameter.grad for parameter in model.parameters()]))
            model.zero_grad()
            found = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")}
            assert found == ({"hit": 0, "miss": 1} if backend == "inductor" else {"hit": 1, "miss": 0})
    assert torch.equal(results[0][0], results[1][0])
