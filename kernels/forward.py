"""The forward of `mok::moe` on one Hopper GPU: arguments in, one launch, y out. No host sync."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .activation import packed
from .driver import MAP_BYTES, MAX_RANKS, Params, kernel, launch, tensor_map
from .exchange import Ranks
from .faults import fault_record
from .layer import Layer
from .weights import map_table
from .workspace import UNIT, Workspace

MAX_EXPERTS, MAX_CHOICES, MAX_UNITS = 512, 32, 2**16 - 1  # as in layout.cuh and combine.cuh
WEIGHT_ON = ("output", "hidden", "input")  # as in layout.cuh
NO_CAPACITY = 2**31 - 1
WEIGHT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
TICK = 2**32 / 1e9  # seconds; the kernel's deadlines count these
TRACE_EVENTS = 1024


_STATES: dict[tuple[int, int], Tensor] = {}


def _state(device: torch.device, stream: int) -> Tensor:
    """The few words that outlive a launch: zero at first, then the kernel's own.

    One a stream, since launches of two streams may overlap; in a graph capture a fresh one, zeroed at each
    replay.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    key = (device.index or 0, stream)
    if key not in _STATES:
        _STATES[key] = torch.zeros(4, dtype=torch.int32, device=device)
    return _STATES[key]


@functools.cache
def _blocks(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layer: Layer,
    *,
    saved: Tensor | None = None,
    only_first: bool = False,
    timeout: float = 60.0,
    trace: Tensor | None = None,
) -> Tensor:
    """y [T, H] bf16 of x [T, H] bf16 (rows of 16-byte multiples), ids and weights [T, k] contiguous.

    What it can do is for `provider.supports` to say; here nothing is checked. `saved`: [2, rows, I], or [1, rows, I]
    without a gate, of x's dtype, filled with the pre-activations of `rows_of` sorted rows (gate, up); with `only_first`
    nothing else is computed, and y is not set. `trace`: int64 [blocks, TRACE_EVENTS, 2], filled by a build of its own.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if topk_ids.numel() == 0:
        return y.zero_()
    blocks = _blocks(x.device.index or 0)
    params, _memory = arguments(y, x, topk_ids, topk_weights, layer, blocks, saved, timeout)
    params.only_first = int(only_first)
    if trace is not None:
        params.trace = trace.data_ptr()
    name = "mok_forward" + variant(layer, saved)
    options = ("MOKFX_TRACE",) if trace is not None else ()
    stream = torch.cuda.current_stream(x.device).cuda_stream
    launch(kernel(x.device.index or 0, name, options), blocks, params, stream)
    return y


def variant(layer: Layer, saved: Tensor | None) -> str:
    """Which build of a kernel runs the layer: the end of its name."""
    if not layer.plain:
        return "_general"
    return "" if saved is None else "_saving"


def arguments(
    y: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layer: Layer,
    blocks: int,
    saved: Tensor | None,
    timeout: float,
    ranks: Ranks | None = None,
) -> tuple[Params, Workspace]:
    """The kernel's argument for `blocks` blocks, and the memory that it names; the launch may outlive neither."""
    tokens, width = x.shape
    work = Workspace(tokens, topk_ids.shape[1], width, layer, blocks, x.device, ranks)
    gate, up, down = layer.first.gate, layer.first.up, layer.down
    listed = map_table(x.device, gate, up, down) if gate.listed or up.listed or down.listed else None
    sigmoid = layer.shared.sigmoid if layer.shared else None
    params = Params(
        x=x.data_ptr(),
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        y=y.data_ptr(),
        slot_outputs=work.address["slots"],
        shared_outputs=work.address["slots"] + work.output_rows * width * 2,
        gathered=x.data_ptr(),
        sigmoid=sigmoid.data_ptr() if sigmoid is not None else None,
        shared_scale=work.address["shared_scale"],
        row_weight=work.address["row_weight"] if layer.weight_on != "output" else None,
        row_token=work.address["row_token"],
        slot_row=work.address["slot_row"],
        histogram=work.address["histogram"],
        ready=work.address["ready"],
        state=ranks.state if ranks else _state(x.device, torch.cuda.current_stream(x.device).cuda_stream).data_ptr(),
        fault=fault_record().data_ptr(),
        listed=listed.data_ptr() if listed is not None else None,
        x_stride=x.stride(0),
        gathered_stride=x.stride(0),
        sigmoid_stride=sigmoid.stride(0) if sigmoid is not None else 0,
        tokens=tokens,
        choices=topk_ids.shape[1],
        experts=down.experts,
        width=width,
        inner=layer.inner,
        chunk=work.chunk,
        chunks=work.chunks,
        shared_inner=layer.shared_inner,
        shared_row=work.output_rows,
        shared_flag=work.flags,
        n_major=layer.n_major,
        first_layer=layer.first.kind,
        curve=layer.act.curve,
        weight_on=WEIGHT_ON.index(layer.weight_on),
        capacity=NO_CAPACITY if layer.capacity is None else layer.capacity,
        by_choice=int(layer.by_choice),
        saved_up=-1 if saved is None else (saved.shape[0] - 1) * saved.shape[1],
        wide_ids=int(topk_ids.dtype == torch.int64),
        weight_kind=WEIGHT_KINDS[topk_weights.dtype],
        gate_bias=packed(layer.bias.gate),
        up_bias=packed(layer.bias.up),
        down_bias=packed(layer.bias.down),
        linear=layer.act.linear,
        cubic=layer.act.cubic,
        limit=layer.act.limit,
        offset=layer.act.offset,
        patience=max(1, round(timeout / TICK)) + 1,
    )
    if ranks:
        _set_ranks(params, ranks, work, width)
    for name, one in _maps(layer, width, work, saved, listed is None).items():
        ctypes.memmove(ctypes.addressof(params) + getattr(Params, name).offset, one, MAP_BYTES)
    return params, work


def _set_ranks(params: Params, ranks: Ranks, work: Workspace, width: int) -> None:
    own, areas = ranks.memory[ranks.rank], ranks.areas
    params.rank, params.ranks, params.most_tokens = ranks.rank, ranks.count, areas.tokens
    params.memory = (ctypes.c_void_p * MAX_RANKS)(*ranks.memory)
    params.ids_at, params.weights_at = areas.ids, areas.weights
    params.rows_at, params.outputs_at = areas.rows, areas.outputs
    params.row_place = work.address["row_place"]
    params.gathered, params.gathered_stride = own + areas.rows, width
    params.slot_outputs = own + areas.outputs
    params.virtual_shift = (ranks.count - 1).bit_length() if ranks.virtual else 0


def _maps(layer: Layer, width: int, work: Workspace, saved: Tensor | None, stacked: bool) -> dict[str, bytes]:
    """The TMA maps by their names in Params; those of listed weights are in a table of their own."""
    rows, shared = max(work.output_rows + work.shared_rows, UNIT), layer.shared
    maps = {
        "hidden": tensor_map(work.address["hidden"], (layer.inner, work.rows), (layer.inner,)),
        "slots": tensor_map(work.address["slots"], (width, rows), (width,)),
    }
    if stacked:
        maps |= {"gate": layer.first.gate.map(), "up": layer.first.up.map(), "down": layer.down.map()}
    if shared:
        maps |= {"shared_gate": shared.gate.map(), "shared_up": shared.up.map(), "shared_down": shared.down.map()}
        size = layer.shared_inner, max(work.shared_rows, UNIT)
        maps["shared_hidden"] = tensor_map(work.address["shared_hidden"], size, size[:1])
    if saved is not None:
        maps["saved"] = tensor_map(saved.data_ptr(), (layer.inner, saved.shape[0] * saved.shape[1]), (layer.inner,))
    return maps
