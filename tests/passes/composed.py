"""Judge a composed layer: what the pass did to it, and whether that computes what the captured graph did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..spellings.layer import MoE, build
from ..spellings.oracle import exact
from ..spellings.spelling import Spelling
from .support import FLAGS, Recording, Run, assert_no_farther, assert_same, compiled, loss_of, run

GONE = {
    "all_to_all_single", "all_to_all_single_autograd", "wait_tensor", "sort", "argsort", "bmm", "baddbmm",
    "einsum", "_grouped_mm", "grouped_mm", "item", "tolist", "autograd_function_apply",
}  # fmt: skip
"""What a rewritten layer has none of; no router of the corpus calls any of them."""


def dtype_of(spelling: Spelling) -> torch.dtype:
    return torch.bfloat16 if spelling.bf16_only else torch.float64


class _Captured(Exception):
    """Ends a call once its graph was seen, so that nothing runs."""


def outcome_of(layer: nn.Module, *inputs: Any) -> Recording:
    """What the pass makes of the one graph of `layer(*inputs)`; the layer does not run."""
    record = Recording()

    def backend(module: Any, example: Any) -> Any:
        record(module, example)
        raise _Captured

    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(**FLAGS):
            torch.compile(layer, backend=backend, fullgraph=True)(*inputs)
    except Exception:
        if not record.outcomes:
            raise
    return record


@contextmanager
def fake_group(ranks: int = 2, rank: int = 0) -> Iterator[Any]:
    """A group of ranks that are not there: enough to capture an exchange."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def assert_one_call(record: Recording) -> None:
    """Exactly one call of the op, and nothing of the layer besides it."""
    outcome = record.outcome
    assert len(outcome.matches) == len(record.calls) == 1, [miss.reason for miss in outcome.misses]
    assert not record.names() & GONE
    assert outcome.matches[0].node == record.calls[0].name


def true_run(layer: MoE, x: Tensor, token_ids: Tensor) -> Run:
    """The dense definition in float64, its gradients taken at the layer's own parameters."""
    y, routed = exact([layer], 0, x, token_ids)
    extras = {"y_logits": routed.logits, "y_aux": routed.aux, "y_ids": routed.ids}
    kind = layer.spelling.outputs
    outputs = (y, extras[kind]) if kind in extras else (y,)
    leaves = {"x": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(loss_of(outputs), list(leaves.values()), allow_unused=True)
    return Run(outputs, dict(zip(leaves, gradients, strict=True)))


def check_layer(spelling: Spelling) -> None:
    """One rank: the layer becomes one call that computes what eager computes, each gradient apart."""
    layer = build(spelling, dtype=dtype_of(spelling))
    x, token_ids = layer.example()
    with compiled(layer) as (function, record):
        got = run(function, layer, x, token_ids)
    assert_one_call(record)
    eager = run(layer, layer, x, token_ids)
    if spelling.bf16_only:
        assert_no_farther(got, eager, true_run(layer, x, token_ids))
    else:
        assert_same(got, eager)


def state_after(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What a run may have changed in place."""
    return {"x": x.detach(), **dict(layer.named_buffers())}


def assert_graph_unchanged_in_meaning(make: Callable[[], MoE], truth: str = "eager") -> None:
    """What the rewritten graph of a layer computes, leaves behind and differentiates is what the graph did.

    The truth is the captured graph itself, not eager: under torch.compile a user's bug stays that bug.
    `make` builds the layer anew for each of the two runs, which may change it; `truth` is what runs the graph
    that is left as it is: "aot_eager" where eager autograd does not see through a collective.
    """
    runs: list[Run] = []
    after: list[dict[str, Tensor]] = []
    for rewrites in (True, False):
        layer = make()
        x, token_ids = layer.example()
        torch._dynamo.reset()
        with torch._dynamo.config.patch(**FLAGS):
            backend: Any = Recording() if rewrites else truth
            runs.append(run(torch.compile(layer, backend=backend, fullgraph=True), layer, x, token_ids))
        after.append(state_after(layer, x))
    got, wanted = runs
    if layer.spelling.bf16_only:
        for (name, a), (_, b) in zip(got.named(), wanted.named(), strict=True):
            assert (a is None) == (b is None), name
            if isinstance(a, Tensor):
                distance, size = (a.double() - b.double()).norm(), b.double().norm()
                assert distance <= 2e-2 * size + 1e-6, f"{name}: {distance} apart, its norm is {size}"
    else:
        assert_same(got, wanted)
    for name, value in after[0].items():
        torch.testing.assert_close(value, after[1][name], rtol=0, atol=0, msg=lambda t, n=name: f"{n}: {t}")
