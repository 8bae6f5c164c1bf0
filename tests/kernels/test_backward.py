"""The backward's host side: what it packs, and buffers for gradients that lie as their weights do."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from torch import Tensor

from mokfx.kernels import build, gradients
from mokfx.kernels.backward import TILE_COLUMNS, BackwardParams, _gradient, empty_like_weights
from mokfx.kernels.driver import Params
from mokfx.kernels.weights import BLOCKS, INTERLEAVED, Matrices, matrices
from mokfx.ops.arguments import Call


def source(name: str) -> str:
    return (build.SOURCE / name).read_text()


def test_the_host_packs_what_the_kernel_reads() -> None:
    found = re.search(r"sizeof\(BackwardParams\) == sizeof\(Params\) \+ (\d+)", source("backward.cuh"))
    assert found and ctypes.sizeof(BackwardParams) == ctypes.sizeof(Params) + int(found.group(1))
    body = re.search(r"struct BackwardParams : Params \{.*?\n(.*?)\n\};", source("backward.cuh"), re.DOTALL)
    assert body
    code = "\n".join(line.split("//")[0] for line in body.group(1).splitlines())
    names = re.findall(r"\*?(\w+)(?:\[\d+\])?(?=[,;])", code)
    assert names == [name for name, *_ in BackwardParams._fields_]
    tile = re.search(r"constexpr int TILE_N = (\d+);", source("layout.cuh"))
    assert tile and int(tile.group(1)) == TILE_COLUMNS


def stored(*shape: int, n_major: bool) -> Tensor:
    if n_major:
        return torch.empty(shape, dtype=torch.bfloat16)
    return torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=torch.bfloat16).transpose(-1, -2)


@pytest.mark.parametrize("n_major", [False, True])
@pytest.mark.parametrize("experts", [1, 5])
def test_buffers_lie_as_the_weights_do_and_lists_are_one_stack(experts: int, n_major: bool) -> None:
    (stack,) = empty_like_weights([stored(experts, 128, 64, n_major=n_major)])
    assert stack.stride() == stored(experts, 128, 64, n_major=n_major).stride()
    listed = empty_like_weights([stored(128, 64, n_major=n_major) for _ in range(experts)])
    assert len(listed) == experts
    assert all(one.stride() == stored(128, 64, n_major=n_major).stride() for one in listed)
    found, whole = matrices(listed), matrices([stack])
    assert isinstance(found, Matrices) and isinstance(whole, Matrices)
    assert found.stacked().spacing == whole.stacked().spacing == 128 * 64
    assert found.stacked().addresses == (listed[0].data_ptr(),)
    assert empty_like_weights([]) == []


def test_lists_that_are_no_stack_are_refused() -> None:
    parts = torch.empty(4, 128, 64, dtype=torch.bfloat16)
    found = matrices([parts[0], parts[1], parts[3]])
    assert isinstance(found, Matrices)
    with pytest.raises(ValueError, match="empty_like_weights"):
        found.stacked()


def test_rows_of_a_gradient_are_those_of_the_hidden_size() -> None:
    first, down = stored(3, 128, 64, n_major=True), stored(3, 64, 128, n_major=True)  # [E, H, I] and [E, I, H]
    for tensor, turned, strides in ((first, False, (64, 1)), (down, True, (1, 128))):
        found = matrices([tensor])
        assert isinstance(found, Matrices)
        packed = _gradient(found, turned)
        assert (packed.first, packed.expert_stride) == (tensor.data_ptr(), 128 * 64)
        assert (packed.row_stride, packed.column_stride) == strides


@pytest.mark.parametrize(
    ("layout", "name", "kind", "expected"),
    [
        ("apart", "gate", BLOCKS, [1, 2]),
        ("apart", "up", BLOCKS, [3, 4]),
        ("gate_up", "gate", BLOCKS, [1, 2, 3, 4]),
        ("up_gate", "gate", BLOCKS, [3, 4, 1, 2]),
        ("interleaved", "gate", BLOCKS, [1, 3, 2, 4]),
        ("interleaved", "gate", INTERLEAVED, [1, 2, 3, 4]),  # the kernel's columns are interleaved already
    ],
)
def test_gradients_of_fused_biases_are_in_the_weights_layout(
    layout: str, name: str, kind: int, expected: list[int]
) -> None:
    some = torch.empty(1)
    call = Call(some, some, some, [some], [], [some], gate_up=layout)
    found = gradients._first_bias(torch.tensor([[1, 2, 3, 4]]), name, call, kind)
    assert found is not None and found.tolist() == [expected]
