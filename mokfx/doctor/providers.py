"""What would run the op here, for some usual calls, and why the others would not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from mokfx.doctor.finding import Finding
from mokfx.ops import all_providers, get_provider, unsupported_reason
from mokfx.ops.arguments import Call
from mokfx.ops.providers import AUTO, REFERENCE

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, CHOICES = 4096, 2048, 768, 16, 2


def providers() -> Iterator[Finding]:
    """For each usual call a line with its provider, and one for each provider that does not run it, and why."""
    setting = get_provider()
    if setting != AUTO:
        yield Finding("mok.provider", f"{setting!r} is set for the whole process", "note")
    for name, call in usual_calls().items():
        with torch.set_grad_enabled(call.x.requires_grad):
            yield from _of(name, call)


def usual_calls() -> dict[str, Call]:
    """A bf16 SwiGLU layer of fake tensors, in inference and in training; in a group, shared among its ranks too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = f"on {device.type}, bf16"
    inference = _call(device, EXPERTS)
    calls = {f"inference {here}": inference, f"training {here}": _with_gradients(inference)}
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.group.WORLD is not None:
        size = dist.get_world_size()
        shared = replace(_call(device, EXPERTS), num_experts=EXPERTS * size, group_name=dist.group.WORLD.group_name)
        calls |= {f"inference, {size} ranks": shared, f"training, {size} ranks": _with_gradients(shared)}
    return calls


def _call(device: torch.device, experts: int) -> Call:
    with FakeTensorMode():
        make = torch.empty
        x = make(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
        ids = make(TOKENS, CHOICES, dtype=torch.int64, device=device)
        weights = make(TOKENS, CHOICES, dtype=torch.float32, device=device)
        wide = [make(experts, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device=device) for _ in range(2)]
        down = make(experts, INTERMEDIATE, HIDDEN, dtype=torch.bfloat16, device=device)
    return Call(x, ids, weights, [wide[0]], [wide[1]], [down], num_experts=experts)


def _with_gradients(call: Call) -> Call:
    weight = call.w_up[0].detach().requires_grad_()
    return replace(call, x=call.x.detach().requires_grad_(), w_up=[weight])


def _of(name: str, call: Call) -> Iterator[Finding]:
    reasons = {p.name: unsupported_reason(call, p.name) for p in all_providers()}
    chosen = unsupported_reason(call)
    if chosen is None:
        runs = _chosen(call)
        slow = "; right, and slow: for development and tests" if runs == REFERENCE else ""
        yield Finding(name, f"runs by {runs}{slow}", "note" if slow else "ok")
    else:
        remedy = 'the layer stays as it is; options={"mok.provider": "reference"} runs it anyway, slowly'
        yield Finding(name, "no provider: the layer would be left alone", "missing", remedy)
    for provider, reason in reasons.items():
        if reason is not None:
            yield Finding(f"  not {provider}", reason.rpartition("cannot run this call: ")[2], "note")


def _chosen(call: Call) -> str:
    from mokfx.ops.providers import select

    return select(call).name
