"""Other implementations of the layer, each behind an adapter of a few lines; they run when they are installed.

An adapter maps the layer's tensors to what the package takes. Whatever depends on the weights alone happens before
the timing, as it would in a model that was written for the package; whatever depends on ids or x happens in the call.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from .errors import Unavailable
from .layer import Layer
from .variants import Make, Outputs, Step, whole_layer, with_gradients


def sonic_moe(layer: Layer, backward: bool) -> Step:
    """sonic-moe, written against 0.1.2.post1: what its `moe_TC_softmax_topk_layer` runs after its router.

    Its documented entry for given ids, `moe_general_routing_inputs`, takes a number of choices for each token, which is
    slower than this path of a fixed k.
    """
    functional = _package("sonic-moe", "sonicmoe.functional")
    swiglu = _package("sonic-moe", "sonicmoe.enums").ActivationType.SWIGLU
    _only_plain_swiglu(layer)
    _only_one_rank(layer)
    tokens, choices = layer.ids.shape
    experts, slots = layer.shape.experts, layer.ids.numel()
    up, down = layer.gate_up.permute(2, 1, 0), layer.down.permute(2, 1, 0)  # [2I, H, E], [H, I, E]

    def forward() -> Tensor:
        sizes = (experts, experts + 1, slots, slots, slots)
        frequency, ends, gather, scatter, back = (
            torch.empty(size, dtype=torch.int32, device=layer.x.device) for size in sizes
        )
        ids = layer.ids.int()
        functional.TC_topk_router_metadata_triton(ids, experts, frequency, ends, gather, scatter, back)
        order = (gather, scatter, back, None, False)
        active, rows = functional._UpProjection.apply(
            layer.x, up, None, ends, slots, choices, *order, swiglu, not backward, True
        )
        y: Tensor = functional._DownProjection.apply(
            active, rows, down, None, layer.weights, ends, tokens, choices, *order, swiglu
        )
        return y

    return whole_layer(layer, backward, forward)


def liger_kernel(layer: Layer, backward: bool) -> Step:
    """liger-kernel, written against 0.8.5: `LigerFusedMoEFunction`, Triton."""
    function = _package("liger-kernel", "liger_kernel.ops").LigerFusedMoEFunction
    _only_plain_swiglu(layer)
    _only_one_rank(layer)
    gate_up, down = layer.gate_up.transpose(1, 2), layer.down.transpose(1, 2)  # [E, 2I, H], [E, H, I]
    return whole_layer(
        layer, backward, lambda: function.apply(layer.x, gate_up, down, layer.ids.int(), layer.weights)
    )


def moe_ops(layer: Layer, backward: bool) -> Step:
    """moe-ops, written against 0.1.0: its README's permute, grouped_gemm and unpermute, Triton."""
    package = _package("moe-ops", "moe_ops")
    _only_plain_swiglu(layer)
    _only_one_rank(layer)
    tokens, choices = layer.ids.shape
    gate_up, down = layer.gate_up.transpose(1, 2), layer.down.transpose(1, 2)  # [E, N, K]

    def forward() -> Tensor:
        rows, where, ends = package.permute(layer.x, layer.ids.int(), E=layer.shape.experts)
        gate, up = package.grouped_gemm(rows, gate_up, ends, trans_b=True).chunk(2, -1)
        out = package.grouped_gemm(F.silu(gate) * up, down, ends, trans_b=True)
        y: Tensor = package.unpermute(out, where, layer.weights, num_tokens=tokens, num_topK=choices)
        return y

    return whole_layer(layer, backward, forward)


def liger_cute_kernels(layer: Layer, backward: bool) -> Step:
    """liger-cute-kernels, written against 0.8.5 beside liger-kernel 0.8.5: `moe_fused`, CUTLASS and NVSHMEM."""
    package = _package("liger-cute-kernels", "liger_cute_kernels")
    moe_fused = _package("liger-kernel", "liger_kernel.ops.cute.ops.moe").moe_fused
    _only_plain_swiglu(layer)
    shape, ranks = layer.shape, layer.ranks
    if not dist.is_initialized():  # it takes its ranks from torch.distributed, even a single one
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    # A configuration cannot grow, and the layer before may have been smaller.
    _package("liger-cute-kernels", "liger_cute_kernels.nvshmem").pool_clear_all()
    package.configure(
        device=ranks.device,
        moe=package.MoEConfig(
            max_tokens=shape.tokens,
            hidden_size=shape.width,
            num_experts=shape.experts,
            top_k=shape.choices,
            num_hosts=1,
            gpus_per_host=ranks.size,
        ),
    )
    gate, up = layer.gate_up.transpose(1, 2).split(shape.inner, 1)  # [E/R, I, H] each
    down = layer.down.transpose(1, 2)
    if backward:
        gate, up, down = (part.detach().contiguous().requires_grad_() for part in (gate, up, down))

    def forward() -> Tensor:
        y: Tensor = moe_fused(
            layer.x, layer.ids.int(), layer.weights, gate, up, down, shape.experts, shape.choices
        )
        return y

    if not backward:
        return whole_layer(layer, backward, forward)

    def gradients(outputs: Outputs) -> Mapping[str, Tensor]:
        _, d_x, d_weights, d_gate, d_up, d_down = outputs
        d_gate_up = torch.cat([d_gate, d_up], 1).transpose(1, 2)
        return {"x": d_x, "weights": d_weights, "gate_up": d_gate_up, "down": d_down.transpose(1, 2)}

    return Step(with_gradients(forward, [layer.x, layer.weights, gate, up, down], layer.grad_y), gradients)


def _package(distribution: str, module: str) -> Any:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(f"{distribution} is not installed here") from None
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a package does where it cannot work
        raise Unavailable(f"{distribution} {version} cannot be imported: {error}") from error


def _only_plain_swiglu(layer: Layer) -> None:
    shape = layer.shape
    if shape.clamp or shape.interleaved or shape.biased or shape.shared:
        raise Unavailable("its adapter is for SwiGLU without biases and without a shared expert")
    if shape.in_out:
        raise Unavailable("it takes weights as nn.Linear stores them")


def _only_one_rank(layer: Layer) -> None:
    if layer.ranks.size > 1:
        raise Unavailable("it runs on one GPU")


PEERS: dict[str, Make] = {
    "sonic-moe": sonic_moe,
    "liger-cute-kernels": liger_cute_kernels,
    "moe-ops": moe_ops,
    "liger-kernel": liger_kernel,
}
