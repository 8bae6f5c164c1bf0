"""The forward of `mok::moe` on one Hopper GPU: arguments in, one launch, y out. No host sync."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .driver import THREADS, Params, kernel, launch, tensor_map

UNIT, MAX_EXPERTS, MAX_CHOICES, MAX_UNITS = 64, 512, 32, 2**16 - 1  # as in layout.cuh and combine.cuh
WEIGHT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
TICK = 2**32 / 1e9  # seconds; the kernel's deadlines count these
TRACE_EVENTS = 1024


@dataclass(frozen=True)
class Stack:
    """Equally spaced bf16 matrices [in, out] of E experts, wherever they lie. Strides count values."""

    address: int
    experts: int
    rows: int
    columns: int
    expert_stride: int
    row_stride: int
    column_stride: int

    @property
    def n_major(self) -> bool:
        """The out columns lie side by side ([in, out] storage), not the in rows."""
        return self.column_stride == 1

    def map(self) -> bytes:
        """Its TMA map: the contiguous dimension, the other one, experts."""
        if self.n_major:
            sizes, inner = (self.columns, self.rows, self.experts), self.row_stride
        else:
            sizes, inner = (self.rows, self.columns, self.experts), self.column_stride
        return tensor_map(self.address, sizes, (inner, self.expert_stride))


def stack(weights: Sequence[Tensor], *, with_address: bool = True) -> Stack | str:
    """One stacked tensor [E, in, out] as a Stack, or why the kernel cannot read it in place.

    Without an address, which fake tensors have not, only shape and strides are looked at.
    """
    if len(weights) != 1 or weights[0].dim() != 3:
        return "its expert weights are listed one by one, and only stacked ones are built"
    weight = weights[0]
    spacing, *strides = weight.stride()
    if 1 not in strides:
        return f"expert weights with strides {tuple(weight.stride())}: neither in nor out lies side by side"
    outer = strides[0] if strides[1] == 1 else strides[1]
    if weight.shape[0] == 1:
        spacing = outer * 8  # of no meaning then, and often 0
    address = weight.data_ptr() if with_address else 0
    if spacing <= 0 or outer <= 0 or outer % 8 or spacing % 8 or address % 16:
        return f"expert weights with strides {tuple(weight.stride())} at an address that TMA cannot read"
    experts, rows, columns = weight.shape
    return Stack(address, experts, rows, columns, spacing, strides[0], strides[1])


def gate_and_up(
    gate: Sequence[Tensor], up: Sequence[Tensor], layout: str
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Gate and up as views of their own, for every layout of the op (see mokfx.ops.schema)."""
    if layout == "apart":
        return gate, up
    if layout == "interleaved":
        return [w[..., 0::2] for w in gate], [w[..., 1::2] for w in gate]
    half = gate[0].shape[-1] // 2
    halves = [w[..., :half] for w in gate], [w[..., half:] for w in gate]
    return halves if layout == "gate_up" else (halves[1], halves[0])


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

    def __init__(
        self, slots: int, experts: int, width: int, inner: int, chunks: int, device: torch.device
    ) -> None:
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
    gate: Stack,
    up: Stack,
    down: Stack,
    *,
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
        patience=max(1, round(timeout / TICK)) + 1,
    )
    base = ctypes.addressof(params)
    for i, bytes_ in enumerate((gate.map(), up.map(), down.map(), hidden, outputs)):
        ctypes.memmove(base + i * len(bytes_), bytes_, len(bytes_))
    name = "mok_forward_" + "kn"[gate.n_major] + "kn"[down.n_major]
    launch(kernel(device, name, ("MOKFX_TRACE",) if trace is not None else ()), blocks, params, stream)
    return y
