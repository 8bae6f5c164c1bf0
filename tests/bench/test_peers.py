"""Each adapter's mapping of layouts and arguments, against a stand-in for its package's documented interface.

The stand-ins compute the layer in plain torch from what the adapter hands them, and insist on the shapes, dtypes and
layouts that the package asks for; so a wrong mapping gives a wrong answer. They do not stand for its speed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mokfx.bench import peers
from mokfx.bench.errors import Unavailable
from mokfx.bench.layer import make
from mokfx.bench.peers import PEERS
from mokfx.bench.ranks import Ranks
from mokfx.bench.truth import distances, truth, wrong

from .layers import ALONE, SHAPES, small


def layer_of(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The layer slot by slot, of weights [E, in, out]."""
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    rows = x[:, None, None, :]
    hidden = F.silu(rows @ gate[ids.long()]) * (rows @ up[ids.long()])
    return ((hidden @ down[ids.long()])[:, :, 0].float() * weights[..., None]).sum(1).to(x.dtype)


def sonic_moe() -> dict[str, Any]:
    """sonic-moe 0.1.2.post1: sonicmoe.functional and sonicmoe.enums."""
    state: dict[str, Tensor] = {}

    def metadata(
        ids: Tensor, experts: int, counts: Tensor, ends: Tensor, gather: Tensor, scatter: Tensor, back: Tensor
    ) -> None:
        assert ids.dtype == torch.int32 and all(t.dtype == torch.int32 for t in (counts, ends, gather, scatter, back))
        assert counts.shape == (experts,) and ends.shape == (experts + 1,) and gather.shape == (ids.numel(),)
        scatter.copy_(ids.flatten().argsort(stable=True))
        gather.copy_(scatter // ids.shape[1])
        back.copy_(scatter.argsort())
        counts.copy_(torch.bincount(ids.flatten(), minlength=experts))
        ends.copy_(F.pad(counts.cumsum(0), (1, 0)))
        state["experts"] = ids.flatten()[scatter.long()].long()

    def up_projection(
        x: Tensor, w1: Tensor, b1: None, ends: Tensor, slots: int, k: int, gather: Tensor, scatter: Tensor,
        back: Tensor, varying: None, is_varying: bool, kind: str, inference: bool, concat: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert w1.stride()[2] > w1.stride()[0] > w1.stride()[1] == 1, "stride order (2, 0, 1)"
        assert b1 is varying is None and not is_varying and kind == "swiglu" and concat
        assert slots == gather.numel() and int(ends[-1]) == slots
        gate, up = w1.permute(2, 1, 0)[state["experts"]].chunk(2, -1)
        rows = x[gather.long()][:, None]
        return (F.silu(rows @ gate) * (rows @ up))[:, 0], None if inference else rows

    def down_projection(
        active: Tensor, rows: Tensor | None, w2: Tensor, b2: None, weights: Tensor, ends: Tensor, tokens: int, k: int,
        gather: Tensor, scatter: Tensor, back: Tensor, varying: None, is_varying: bool, kind: str,
    ) -> Tensor:  # fmt: skip
        assert w2.stride()[2] > w2.stride()[0] > w2.stride()[1] == 1, "stride order (2, 0, 1)"
        assert b2 is None and (rows is None) == (not torch.is_grad_enabled())
        out = (active[:, None] @ w2.permute(2, 1, 0)[state["experts"]])[:, 0]
        return (out[back.long()].view(tokens, k, -1).float() * weights[..., None]).sum(1).to(out.dtype)

    return {
        "sonicmoe.functional": {
            "TC_topk_router_metadata_triton": metadata,
            "_UpProjection": SimpleNamespace(apply=up_projection),
            "_DownProjection": SimpleNamespace(apply=down_projection),
        },
        "sonicmoe.enums": {"ActivationType": SimpleNamespace(SWIGLU="swiglu")},
    }


def liger_kernel() -> dict[str, Any]:
    """liger-kernel 0.8.5: liger_kernel.ops.LigerFusedMoEFunction."""

    def apply(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert gate_up.is_contiguous() and down.is_contiguous() and gate_up.shape[2] == down.shape[1] == x.shape[1]
        gate, up = gate_up.transpose(1, 2).chunk(2, -1)
        return layer_of(x, ids, weights, gate, up, down.transpose(1, 2))

    return {"liger_kernel.ops": {"LigerFusedMoEFunction": SimpleNamespace(apply=apply)}}


def moe_ops() -> dict[str, Any]:
    """moe-ops 0.1.0: permute, grouped_gemm, unpermute."""

    def permute(x: Tensor, ids: Tensor, num_out_tokens: int = 0, E: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        assert ids.dtype == torch.int32 and E is not None
        order = ids.flatten().argsort()
        where = order.argsort().view(ids.shape).t().flatten()  # choice by choice: entry k * T + t
        return x[order // ids.shape[1]], where, F.pad(torch.bincount(ids.flatten(), minlength=E).cumsum(0), (1, 0))

    def grouped_gemm(rows: Tensor, weights: Tensor, ends: Tensor, trans_b: bool = True) -> Tensor:
        assert trans_b and weights.is_contiguous() and weights.shape[2] == rows.shape[1]
        parts = rows.split(ends.diff().tolist())
        return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])

    def unpermute(rows: Tensor, where: Tensor, weights: Tensor, num_tokens: int, num_topK: int) -> Tensor:
        slots = rows[where].view(num_topK, num_tokens, -1)
        return (slots.float() * weights.t()[..., None]).sum(0).to(rows.dtype)

    return {"moe_ops": {"permute": permute, "grouped_gemm": grouped_gemm, "unpermute": unpermute}}


def liger_cute_kernels() -> dict[str, Any]:
    """liger-cute-kernels 0.8.5: MoEConfig and configure, and liger-kernel's moe_fused."""
    state: dict[str, Any] = {}

    def configure(*, device: torch.device, moe: SimpleNamespace) -> None:
        assert state.pop("cleared", False), "a configuration cannot grow"
        assert moe.num_hosts * moe.gpus_per_host == 1
        state["moe"] = moe

    def moe_fused(
        x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, experts: int, k: int
    ) -> Tensor:
        moe = state["moe"]
        assert x.shape == (moe.max_tokens, moe.hidden_size) and (experts, k) == (moe.num_experts, moe.top_k)
        assert gate.stride()[1:] == up.stride()[1:] == (x.shape[1], 1) and down.is_contiguous()
        assert not torch.is_grad_enabled() or (gate.is_contiguous() and up.is_contiguous())
        return layer_of(x, ids, weights, *(weight.transpose(1, 2) for weight in (gate, up, down)))

    return {
        "liger_cute_kernels": {"MoEConfig": SimpleNamespace, "configure": configure},
        "liger_cute_kernels.nvshmem": {"pool_clear_all": lambda: state.update(cleared=True)},
        "liger_kernel.ops.cute.ops.moe": {"moe_fused": moe_fused},
    }


STANDINS: dict[str, Callable[[], dict[str, Any]]] = {
    "sonic-moe": sonic_moe,
    "liger-kernel": liger_kernel,
    "moe-ops": moe_ops,
    "liger-cute-kernels": liger_cute_kernels,
}


@pytest.fixture
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a peer that a stand-in makes importable."""
    name: str = request.param
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "1.0")
    for path, content in STANDINS[name]().items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            module = ".".join(parts[:end])
            if module not in sys.modules or end == len(parts):
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
        for attribute, value in content.items():
            monkeypatch.setattr(sys.modules[path], attribute, value, raising=False)
    monkeypatch.setattr(peers.dist, "is_initialized", lambda: True)
    return name


def test_every_peer_has_a_stand_in() -> None:
    assert set(STANDINS) == set(PEERS)


@pytest.mark.parametrize("installed", STANDINS, indirect=True)
@pytest.mark.parametrize("backward", [False, True])
def test_the_mapping_gives_the_layers_answer(installed: str, backward: bool) -> None:
    layer = small(backward=backward)
    right = truth(layer, backward)
    with torch.set_grad_enabled(backward):
        step = PEERS[installed](layer, backward)
        outputs = step.run()
    assert step.gradients is not None
    with torch.no_grad():
        found = distances(right, outputs[0], step.gradients(outputs))
    assert wrong(found) is None, found
    assert ("d_gate_up" in found) == backward


@pytest.mark.parametrize("name", PEERS)
def test_an_absent_peer_is_named(name: str) -> None:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        with pytest.raises(Unavailable, match=f"{name} is not installed here"):
            PEERS[name](small(), False)
    else:
        pytest.skip(f"{name} is installed")


def test_a_peer_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "9.9")
    monkeypatch.setitem(sys.modules, "moe_ops", None)
    with pytest.raises(Unavailable, match=r"moe-ops 9\.9 cannot be imported: import of moe_ops halted"):
        PEERS["moe-ops"](small(), False)


@pytest.mark.parametrize("installed", STANDINS, indirect=True)
def test_what_a_peer_cannot_do_is_told(installed: str) -> None:
    for kind in ("gpt-oss", "shared"):
        with pytest.raises(Unavailable, match="without biases and without a shared expert"):
            PEERS[installed](small(kind), False)
    turned = make(replace(SHAPES["plain"], in_out=True), ALONE)
    with pytest.raises(Unavailable, match=r"as nn\.Linear stores them"):
        PEERS[installed](turned, False)
    if installed != "liger-cute-kernels":
        beside = replace(small(), ranks=Ranks(ALONE.device, 0, 2, "group"))
        with pytest.raises(Unavailable, match="it runs on one GPU"):
            PEERS[installed](beside, False)
