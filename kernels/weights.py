"""Expert weights as the kernel reads them, in place: where they lie, and the TMA maps that say so."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .driver import MAP_BYTES, tensor_map


@dataclass(frozen=True)
class Matrices:
    """The bf16 matrices [in, out] of E experts, of one shape and strides. Strides count values.

    Stacked: one address, and `spacing` values from an expert to the next. Listed: E addresses, spacing 0.
    """

    addresses: tuple[int, ...]
    experts: int
    rows: int
    columns: int
    spacing: int
    row_stride: int
    column_stride: int

    @property
    def listed(self) -> bool:
        """Each expert has an address of its own."""
        return self.spacing == 0

    @property
    def n_major(self) -> bool:
        """The out columns lie side by side ([in, out] storage), not the in rows."""
        return self.column_stride == 1

    def part(self, first: int, step: int, columns: int) -> Matrices:
        """Every step-th column from the first on, as matrices of their own."""
        addresses = tuple(address + first * self.column_stride * 2 for address in self.addresses)
        return replace(self, addresses=addresses, columns=columns, column_stride=self.column_stride * step)

    def unreadable(self) -> str | None:
        """Why TMA cannot read them in place, or None."""
        strides = self.row_stride, self.column_stride
        if 1 not in strides:
            return f"expert weights [in, out] with strides {strides}: neither in nor out lies side by side"
        outer = strides[0] if strides[1] == 1 else strides[1]
        if outer <= 0 or outer % 8 or self.spacing % 8 or any(address % 16 for address in self.addresses):
            return f"expert weights [in, out] of strides {strides}: they, or addresses, are not in 16 bytes"
        return None

    def stacked(self) -> Matrices:
        """Listed slices of one stack as that stack. Raises ValueError if they are not evenly spaced."""
        if not self.listed:
            return self
        following = zip(self.addresses, self.addresses[1:], strict=False)
        steps = {b - a for a, b in following} or {self.rows * self.columns * 2}
        if len(steps) > 1:
            raise ValueError("these matrices are not slices of one stack: make them with empty_like_weights")
        return replace(self, addresses=self.addresses[:1], spacing=steps.pop() // 2)

    def map(self) -> bytes:
        """The TMA map of stacked matrices: the contiguous dimension, the other one, experts."""
        return self._map(self.addresses[0], self.experts, self.spacing)

    def maps(self) -> list[bytes]:
        """A TMA map for each expert, stacked or listed."""
        if self.listed:
            addresses = self.addresses
        else:
            addresses = tuple(self.addresses[0] + e * self.spacing * 2 for e in range(self.experts))
        return [self._map(address, 1, self.rows * self.columns) for address in addresses]

    def _map(self, address: int, experts: int, spacing: int) -> bytes:
        if self.n_major:
            return tensor_map(address, (self.columns, self.rows, experts), (self.row_stride, spacing))
        return tensor_map(address, (self.rows, self.columns, experts), (self.column_stride, spacing))


def matrices(weights: Sequence[Tensor], *, with_address: bool = True) -> Matrices | str:
    """One stacked tensor [E, in, out] or E tensors [in, out] as Matrices, or why they cannot be.

    Without an address, which fake tensors have not, only shapes and strides are looked at.
    """
    first = weights[0]
    rows, columns = first.shape[-2:]
    row_stride, column_stride = first.stride()[-2:]
    if first.dim() == 3:
        # One expert's spacing means nothing to it, and an expanded stack's is 0: both become listed.
        spacing = first.stride(0) if first.shape[0] > 1 else 0
        experts = first.shape[0]
        start = first.data_ptr() if with_address else 0
        addresses = (start,) * (experts if spacing == 0 else 1)
        return Matrices(addresses, experts, rows, columns, spacing, row_stride, column_stride)
    if any(weight.stride() != first.stride() for weight in weights):
        return "expert weights that are listed with different strides"
    addresses = tuple(weight.data_ptr() if with_address else 0 for weight in weights)
    return Matrices(addresses, len(weights), rows, columns, 0, row_stride, column_stride)


BLOCKS, INTERLEAVED, UNGATED = range(3)
"""`FirstLayer` of layout.cuh."""


@dataclass(frozen=True)
class FirstLayer:
    """Gate and up, each as matrices of its own; both as one if interleaved columns lie side by side; or up alone."""

    gate: Matrices
    up: Matrices
    kind: int = BLOCKS


def first_layer(
    gate: Sequence[Tensor], up: Sequence[Tensor], layout: str, *, with_address: bool = True
) -> FirstLayer | str:
    """The first layer for every layout of the op (see mokfx.ops.schema), or why the kernel cannot read it.

    `gate` is empty if the activation has none.
    """
    left = matrices(gate or up, with_address=with_address)
    if isinstance(left, str):
        return left
    if not gate:
        return FirstLayer(left, left, UNGATED)
    if layout == "apart":
        right = matrices(up, with_address=with_address)
        return right if isinstance(right, str) else FirstLayer(left, right)
    if layout == "interleaved" and left.n_major:
        return FirstLayer(left, left, INTERLEAVED)
    half = left.columns // 2
    if layout == "interleaved":
        return FirstLayer(left.part(0, 2, half), left.part(1, 2, half))
    halves = left.part(0, 1, half), left.part(half, 1, half)
    return FirstLayer(*(halves if layout == "gate_up" else halves[::-1]))


@functools.lru_cache(maxsize=1024)
def map_table(device: torch.device, gate: Matrices, up: Matrices, down: Matrices) -> Tensor:
    """The maps of each expert's gate, up and down in device memory, uint8 [3, E, 128]: for listed weights.

    Made at a layer's first call; raises RuntimeError if that is inside a CUDA graph capture.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("mok.moe: call a layer of listed expert weights once before capturing a graph")
    data = bytearray(b"".join(one for group in (gate, up, down) for one in group.maps()))
    table = torch.frombuffer(data, dtype=torch.uint8).pin_memory().to(device, non_blocking=True)
    return table.view(3, gate.experts, MAP_BYTES)
