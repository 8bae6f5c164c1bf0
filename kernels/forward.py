"""The forward of `mok::moe` on one Hopper GPU: arguments in, one launch, y out. No host sync."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .activation import NO_BIASES, SWIGLU, Activation, Biases, packed
from .driver import MAP_BYTES, THREADS, Params, kernel, launch, tensor_map
from .weights import BLOCKS, FirstLayer, Matrices, map_table

UNIT, TILE_ROWS, MAX_EXPERTS, MAX_CHOICES, MAX_UNITS = 64, 128, 512, 32, 2**16 - 1  # as in layout.cuh and combine.cuh
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
def fault_record() -> Tensor:
    """Host memory in which a kernel that gives up writes why: reason, block, thread, what it found."""
    return torch.zeros(4, dtype=torch.int32, pin_memory=True)


REASONS = {
    1: "an expert id out of range: {2}",
    2: "the other blocks of the grid did not arrive",
    3: "a stage of operands was never filled",
    4: "a stage of operands was never emptied",
    5: "no next tile was announced",
    6: "the announced tile was never read",
    7: "rows of hidden were not finished by other blocks ({2} had been)",
    8: "slot outputs were not finished by other blocks ({2} had been)",
}


def fault() -> str | None:
    """Why the last kernel gave up, in a sentence, or None. After a fault the CUDA context is lost."""
    reason, block, thread, found = fault_record().tolist()
    if reason == 0:
        return None
    return f"block {block}, thread {thread}: " + REASONS[reason].format(block, thread, found)


@functools.cache
def _blocks(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class SharedExpert:
    """SwiGLU of its own width for every token: [H, S], [H, S] and [S, H]; `sigmoid` [H, 1] or None."""

    gate: Matrices
    up: Matrices
    down: Matrices
    sigmoid: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """One layer's networks and settings, as the kernel takes them."""

    first: FirstLayer
    down: Matrices
    act: Activation = SWIGLU
    bias: Biases = NO_BIASES
    shared: SharedExpert | None = None
    weight_on: str = "output"
    capacity: int | None = None
    by_choice: bool = False

    @property
    def inner(self) -> int:
        """I."""
        return self.down.rows

    @property
    def shared_inner(self) -> int:
        """Width of the shared expert, 0 if there is none."""
        return self.shared.down.rows if self.shared else 0

    @property
    def plain(self) -> bool:
        """SwiGLU without biases, for which there are kernels of their own."""
        sigmoid = self.shared is not None and self.shared.sigmoid is not None
        special = self.bias.present or sigmoid or self.weight_on != "output" or self.first.kind != BLOCKS
        return self.act == SWIGLU and not special


def rows_of(slots: int, experts: int) -> int:
    """The most rows that any routing can pad `slots` slots to: whole units for each expert."""
    return (slots // UNIT + experts) * UNIT


class Workspace:
    """Buffers of one call, cut from one allocation of torch's allocator, which knows streams and graphs."""

    def __init__(self, tokens: int, choices: int, width: int, layer: Layer, chunks: int, device: torch.device) -> None:
        slots, experts = tokens * choices, layer.down.experts
        self.rows = rows_of(slots, experts)
        self.shared_rows = -(-tokens // UNIT) * UNIT if layer.shared else 0
        self.flags = slots // UNIT + experts  # of the routed experts' row tiles; the shared expert's come after
        shared_flags = -(-tokens // TILE_ROWS) if layer.shared else 0
        parts = {
            "hidden": self.rows * layer.inner * 2,
            "shared_hidden": self.shared_rows * layer.shared_inner * 2,
            "slot_outputs": (self.rows + self.shared_rows) * width * 2,
            "row_token": self.rows * 4,
            "row_weight": self.rows * 4,
            "slot_row": slots * 4,
            "shared_scale": tokens * 4,
            "histogram": chunks * experts * 4,
            "ready": (self.flags + shared_flags) * 4,
        }
        ends, total = {}, 0
        for name, size in parts.items():
            ends[name] = total
            total += -(-size // 256) * 256
        self.memory = torch.empty(total, dtype=torch.uint8, device=device)
        self.address = {name: self.memory.data_ptr() + at for name, at in ends.items()}


def forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    layer: Layer,
    *,
    saved: Tensor | None = None,
    timeout: float = 60.0,
    trace: Tensor | None = None,
) -> Tensor:
    """y [T, H] bf16 of x [T, H] bf16 (rows of 16-byte multiples), ids and weights [T, k] contiguous.

    What it can do is for `provider.supports` to say; here nothing is checked. `saved`: [2, rows, I], or [1, rows, I]
    without a gate, of x's dtype, filled with the pre-activations of `rows_of` sorted rows (gate, up).
    `trace`: int64 [blocks, TRACE_EVENTS, 2], filled by a build of its own.
    """
    tokens, width = x.shape
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    choices = topk_ids.shape[1]
    slots = tokens * choices
    if slots == 0:
        return y.zero_()
    device = x.device.index or 0
    blocks = _blocks(device)
    chunk = -(-slots // (blocks * THREADS)) * THREADS  # what each block counts: whole rounds of its threads
    chunks = -(-slots // chunk)
    work = Workspace(tokens, choices, width, layer, chunks, x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    state = _state(x.device, stream)
    gate, up, down = layer.first.gate, layer.first.up, layer.down
    listed = map_table(x.device, gate, up, down) if gate.listed or up.listed or down.listed else None
    shared = layer.shared
    sigmoid = shared.sigmoid if shared else None
    params = Params(
        x=x.data_ptr(),
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        y=y.data_ptr(),
        slot_outputs=work.address["slot_outputs"],
        sigmoid=sigmoid.data_ptr() if sigmoid is not None else None,
        shared_scale=work.address["shared_scale"],
        row_weight=work.address["row_weight"] if layer.weight_on != "output" else None,
        row_token=work.address["row_token"],
        slot_row=work.address["slot_row"],
        histogram=work.address["histogram"],
        ready=work.address["ready"],
        state=state.data_ptr(),
        fault=fault_record().data_ptr(),
        trace=trace.data_ptr() if trace is not None else None,
        listed=listed.data_ptr() if listed is not None else None,
        x_stride=x.stride(0),
        sigmoid_stride=sigmoid.stride(0) if sigmoid is not None else 0,
        tokens=tokens,
        choices=choices,
        experts=down.experts,
        width=width,
        inner=layer.inner,
        chunk=chunk,
        chunks=chunks,
        shared_inner=layer.shared_inner,
        shared_row=work.rows,
        shared_flag=work.flags,
        n_major=_n_major(layer),
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
    outputs = tensor_map(work.address["slot_outputs"], (width, work.rows + work.shared_rows), (width,))
    maps = {"hidden": tensor_map(work.address["hidden"], (layer.inner, work.rows), (layer.inner,)), "slots": outputs}
    if listed is None:
        maps |= {"gate": gate.map(), "up": up.map(), "down": down.map()}
    if shared:
        maps |= {"shared_gate": shared.gate.map(), "shared_up": shared.up.map(), "shared_down": shared.down.map()}
        rows = work.shared_rows, layer.shared_inner
        maps["shared_hidden"] = tensor_map(work.address["shared_hidden"], rows[::-1], rows[1:])
    if saved is not None:
        maps["saved"] = tensor_map(saved.data_ptr(), (layer.inner, saved.shape[0] * saved.shape[1]), (layer.inner,))
    for name, one in maps.items():
        ctypes.memmove(ctypes.addressof(params) + getattr(Params, name).offset, one, MAP_BYTES)
    general = "" if layer.plain else "_general"
    name = "mok_forward" + (general or ("" if saved is None else "_saving"))
    launch(kernel(device, name, ("MOKFX_TRACE",) if trace is not None else ()), blocks, params, stream)
    return y


def _n_major(layer: Layer) -> int:
    """`n_major` of layout.cuh."""
    bits = layer.first.gate.n_major | layer.down.n_major << 1
    if layer.shared:
        bits |= layer.shared.gate.n_major << 2 | layer.shared.down.n_major << 3
    return bits
