"""The backward of `mok::moe` on one Hopper GPU: arguments in, one launch, gradients out. No host sync."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .activation import SWIGLU, packed
from .driver import MAP_BYTES, Params, kernel, launch, tensor_map
from .faults import fault_record
from .forward import NO_CAPACITY, TICK, WEIGHT_KINDS, WEIGHT_ON, _blocks, _state
from .layer import Layer
from .weights import BLOCKS, INTERLEAVED, UNGATED, FirstLayer, Matrices, map_table
from .workspace import THREADS, UNIT, Buffers, rows_of

TILE_COLUMNS = 256  # TILE_N of layout.cuh


class Gradient(ctypes.Structure):
    """`Gradient` of backward.cuh: an address, and strides in values."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("expert_stride", "row_stride", "column_stride")),
    )


class BackwardParams(Params):
    """The kernel's one argument; the same fields in the same order as `BackwardParams` in backward.cuh."""

    _fields_ = (
        ("first", ctypes.c_ubyte * MAP_BYTES),
        *((name, Gradient) for name in ("d_gate", "d_up", "d_down")),
        *((name, ctypes.c_void_p) for name in ("grad_y", "hidden_values", "first_values", "weight_parts", "d_weights")),
        *((name, ctypes.c_void_p) for name in ("d_first_bias", "d_down_bias")),
        ("grad_y_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("parts", "split", "weight_on_hidden", "plain")),
        ("reserved_too", ctypes.c_int * 20),
    )


@dataclass(frozen=True)
class Gradients:
    """What the launch writes besides the gradients of the expert weights.

    `first_bias` [E, I or 2 I] bf16 is that of the gate's bias and beside it the up's, or interleaved as the columns
    of the weights are; `down_bias` [E, H]. None where there is no bias.
    """

    x: Tensor
    topk_weights: Tensor
    first_bias: Tensor | None
    down_bias: Tensor | None


def empty_like_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Buffers for gradients of no, one stacked [E, in, out] or E listed [in, out] weights, of their shapes and strides.

    Those of listed weights are slices of one stack, so that one TMA map reaches them all.
    """
    if not weights:
        return []
    if weights[0].dim() == 3:
        return [torch.empty_like(weights[0])]
    first = torch.empty_like(weights[0], device="meta")
    shape, strides = (len(weights), *first.shape), (first.numel(), *first.stride())
    stack = torch.empty_strided(shape, strides, dtype=first.dtype, device=weights[0].device)
    return list(stack.unbind(0))


def backward(
    grad_y: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layer: Layer,
    saved: Tensor,
    d_first: FirstLayer,
    d_down: Matrices,
    *,
    timeout: float = 60.0,
    trace: Tensor | None = None,
) -> Gradients:
    """The gradients of a call of `forward` from grad_y [T, H] bf16 and the call's own arguments, which see.

    x and grad_y have rows of 16-byte multiples. `saved` is what the forward kept. `d_first` and `d_down`: where the
    gradients of the weights go, buffers made by `empty_like_weights`. `trace`: int64
    [blocks, TRACE_EVENTS, 2], filled by a build of its own.
    """
    tokens, width = x.shape
    first, down, bias, device = layer.first, layer.down, layer.bias, x.device
    choices, inner, experts = topk_ids.shape[1], layer.inner, down.experts
    slots, parts = tokens * choices, 1 if first.kind == UNGATED else 2
    d_x = torch.empty(tokens, width, dtype=x.dtype, device=device)
    d_weights = torch.empty_like(topk_weights)
    d_first_bias = torch.empty(experts, parts * inner, dtype=x.dtype, device=device) if bias.up is not None else None
    d_down_bias = torch.empty(experts, width, dtype=x.dtype, device=device) if bias.down is not None else None
    blocks = _blocks(device.index or 0)
    chunk = max(1, -(-slots // (blocks * THREADS))) * THREADS  # what each block counts: whole rounds of its threads
    chunks = -(-slots // chunk)
    rows = rows_of(slots, experts)
    work = Buffers(
        device,
        hidden=rows * inner * 2,
        first=rows * parts * inner * 2,
        slot_outputs=rows * width * 2,
        row_token=rows * 4,
        row_weight=rows * 4,
        weight_parts=rows * 2 * -(-inner // TILE_COLUMNS) * 4,
        slot_row=slots * 4,
        histogram=chunks * experts * 4,
        ready=rows // UNIT * 4,
    )
    stream = torch.cuda.current_stream(device).cuda_stream
    state = _state(device, stream)
    matrices = {"gate": first.gate, "up": first.up, "down": down}
    listed = map_table(device, *matrices.values()) if any(one.listed for one in matrices.values()) else None
    params = BackwardParams(
        x=x.data_ptr(),
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        y=d_x.data_ptr(),
        **{name: work.address[name] for name in ("slot_outputs", "row_token", "row_weight", "slot_row")},
        **{name: work.address[name] for name in ("histogram", "ready", "weight_parts")},
        state=state.data_ptr(),
        fault=fault_record().data_ptr(),
        trace=_address(trace),
        listed=_address(listed),
        down_bias=packed(bias.down),
        x_stride=x.stride(0),
        tokens=tokens,
        choices=choices,
        experts=experts,
        width=width,
        inner=inner,
        chunk=chunk,
        chunks=chunks,
        shared_flag=rows // UNIT,
        first_layer=first.kind,
        curve=layer.act.curve,
        weight_on=WEIGHT_ON.index("hidden"),  # gradients of x are summed without weights
        capacity=NO_CAPACITY if layer.capacity is None else layer.capacity,
        by_choice=int(layer.by_choice),
        saved_up=(parts - 1) * rows,
        wide_ids=int(topk_ids.dtype == torch.int64),
        weight_kind=WEIGHT_KINDS[topk_weights.dtype],
        patience=max(1, round(timeout / TICK)) + 1,
        linear=layer.act.linear,
        cubic=layer.act.cubic,
        limit=layer.act.limit,
        offset=layer.act.offset,
        d_gate=_gradient(d_first.gate),
        d_up=_gradient(d_first.up),
        d_down=_gradient(d_down, turned=True),
        grad_y=grad_y.data_ptr(),
        hidden_values=work.address["hidden"],
        first_values=work.address["first"],
        d_weights=d_weights.data_ptr(),
        d_first_bias=_address(d_first_bias),
        d_down_bias=_address(d_down_bias),
        grad_y_stride=grad_y.stride(0),
        parts=parts,
        split={UNGATED: 0, BLOCKS: inner, INTERLEAVED: 2 * inner}[first.kind],
        weight_on_hidden=int(layer.weight_on == "hidden"),
        plain=int(layer.act == SWIGLU and first.kind == BLOCKS),
    )
    maps = {
        "hidden": tensor_map(work.address["hidden"], (inner, rows), (inner,)),
        "saved": tensor_map(saved.data_ptr(), (inner, parts * rows), (inner,)),
        "first": tensor_map(work.address["first"], (parts * inner, rows), (parts * inner,)),
    }
    if listed is None:
        maps |= {name: one.map() for name, one in matrices.items()}
    for name, one in maps.items():
        ctypes.memmove(ctypes.addressof(params) + getattr(BackwardParams, name).offset, one, MAP_BYTES)
    name = "mok_backward_" + "kn"[first.up.n_major] + "kn"[down.n_major]
    options = ("MOKFX_TRACE",) if trace is not None else ()
    launch(kernel(device.index or 0, name, options, source="backward"), blocks, params, stream)
    return Gradients(d_x, d_weights, d_first_bias, d_down_bias)


def _gradient(into: Matrices, turned: bool = False) -> Gradient:
    """Of [H, I] matrices, or of [I, H] ones that are turned, as the kernel's argument."""
    stack = into.stacked()
    strides = stack.row_stride, stack.column_stride
    return Gradient(stack.addresses[0], stack.spacing, *(strides[::-1] if turned else strides))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
