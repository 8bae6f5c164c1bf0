"""The forward of `mok::moe` on one Hopper GPU: arguments in, one launch, y out. No host sync."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .activation import NO_BIASES, SWIGLU, Activation, Biases, packed
from .driver import MAP_BYTES, THREADS, Params, kernel, launch, tensor_map
from .weights import Matrices, map_table

UNIT, MAX_EXPERTS, MAX_CHOICES, MAX_UNITS = 64, 512, 32, 2**16 - 1  # as in layout.cuh and combine.cuh
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


class Workspace:
    """Buffers of one call, cut from one allocation of torch's allocator, which knows streams and graphs."""

    def __init__(self, slots: int, experts: int, width: int, inner: int, chunks: int, device: torch.device) -> None:
        self.rows = (slots // UNIT + experts) * UNIT  # the most that any routing can pad to
        parts = {
            "hidden": self.rows * inner * 2,
            "slot_outputs": self.rows * width * 2,
            "row_token": self.rows * 4,
            "slot_row": slots * 4,
            "histogram": chunks * experts * 4,
            "ready": (slots // UNIT + experts) * 4,
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
    gate: Matrices,
    up: Matrices,
    down: Matrices,
    *,
    act: Activation = SWIGLU,
    bias: Biases = NO_BIASES,
    timeout: float = 60.0,
    trace: Tensor | None = None,
) -> Tensor:
    """y [T, H] bf16 of x [T, H] bf16 (rows of 16-byte multiples), ids and weights [T, k] contiguous.

    What it can do is for `provider.supports` to say; here nothing is checked. `trace`: int64
    [blocks, TRACE_EVENTS, 2], filled by a build of its own.
    """
    tokens, width = x.shape
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    choices, inner = topk_ids.shape[1], gate.columns
    slots = tokens * choices
    if slots == 0:
        return y.zero_()
    device = x.device.index or 0
    blocks = _blocks(device)
    chunk = -(-slots // (blocks * THREADS)) * THREADS  # what each block counts: whole rounds of its threads
    chunks = -(-slots // chunk)
    work = Workspace(slots, gate.experts, width, inner, chunks, x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    state = _state(x.device, stream)
    hidden = tensor_map(work.address["hidden"], (inner, work.rows), (inner,))
    outputs = tensor_map(work.address["slot_outputs"], (width, work.rows), (width,))
    listed = map_table(x.device, gate, up, down) if gate.listed or up.listed or down.listed else None
    params = Params(
        x=x.data_ptr(),
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        y=y.data_ptr(),
        slot_outputs=work.address["slot_outputs"],
        row_token=work.address["row_token"],
        slot_row=work.address["slot_row"],
        histogram=work.address["histogram"],
        ready=work.address["ready"],
        state=state.data_ptr(),
        fault=fault_record().data_ptr(),
        trace=trace.data_ptr() if trace is not None else None,
        listed=listed.data_ptr() if listed is not None else None,
        x_stride=x.stride(0),
        tokens=tokens,
        choices=choices,
        experts=gate.experts,
        width=width,
        inner=inner,
        chunk=chunk,
        chunks=chunks,
        wide_ids=int(topk_ids.dtype == torch.int64),
        weight_kind=WEIGHT_KINDS[topk_weights.dtype],
        gate_bias=packed(bias.gate),
        up_bias=packed(bias.up),
        down_bias=packed(bias.down),
        linear=act.linear,
        cubic=act.cubic,
        limit=act.limit,
        offset=act.offset,
        patience=max(1, round(timeout / TICK)) + 1,
    )
    base = ctypes.addressof(params)
    stacked = [weights.map() for weights in (gate, up, down)] if listed is None else [bytes(MAP_BYTES)] * 3
    for i, one in enumerate((*stacked, hidden, outputs)):
        ctypes.memmove(base + i * MAP_BYTES, one, MAP_BYTES)
    general = "" if act == SWIGLU and not bias.present else "general_"
    name = "mok_forward_" + general + "kn"[gate.n_major] + "kn"[down.n_major]
    launch(kernel(device, name, ("MOKFX_TRACE",) if trace is not None else ()), blocks, params, stream)
    return y
