"""Loads the cubin and launches its kernels through the CUDA driver API (cuda-bindings), in torch's context.

The driver API needs nothing of torch's C++ ABI, so one build serves every torch; cuda-bindings is NVIDIA's.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any

from .build import build
from .faults import fault

MAP_BYTES = 128
MAPS = (
    *("gate", "up", "down", "shared_gate", "shared_up", "shared_down"),
    *("hidden", "slots", "shared_hidden", "saved"),
)
MAX_RANKS = 8  # as in layout.cuh
SHARED_BYTES = 227 * 1024  # all that a block can have
THREADS = 384
BOX = 64


class Bias(ctypes.Structure):
    """`Bias` of layout.cuh: an address or None, and strides in values."""

    _fields_ = (("first", ctypes.c_void_p), ("expert_stride", ctypes.c_int), ("column_stride", ctypes.c_int))


class Params(ctypes.Structure):
    """The kernels' one argument; the same fields in the same order as `Params` in layout.cuh."""

    _fields_ = (
        *((name, ctypes.c_ubyte * MAP_BYTES) for name in MAPS),
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "y", "slot_outputs", "shared_outputs")),
        *((name, ctypes.c_void_p) for name in ("gathered", "sigmoid", "shared_scale", "row_weight")),
        ("memory", ctypes.c_void_p * MAX_RANKS),
        *((name, ctypes.c_longlong) for name in ("ids_at", "weights_at", "rows_at", "outputs_at")),
        *((name, ctypes.c_void_p) for name in ("row_token", "row_place", "slot_row")),
        *((name, ctypes.c_void_p) for name in ("histogram", "ready", "state", "fault", "trace", "listed")),
        *((name, Bias) for name in ("gate_bias", "up_bias", "down_bias")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "sigmoid_stride", "gathered_stride")),
        *((name, ctypes.c_int) for name in ("tokens", "choices", "experts", "width", "inner")),
        *((name, ctypes.c_int) for name in ("rank", "ranks", "most_tokens", "virtual_shift", "chunk", "chunks")),
        *((name, ctypes.c_int) for name in ("shared_inner", "shared_row", "shared_flag", "n_major")),
        *((name, ctypes.c_int) for name in ("first_layer", "curve", "weight_on", "capacity", "by_choice")),
        *((name, ctypes.c_int) for name in ("saved_up", "wide_ids", "weight_kind")),
        ("patience", ctypes.c_uint),
        *((name, ctypes.c_float) for name in ("linear", "cubic", "limit", "offset")),
        ("only_first", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
    )


def bindings() -> Any:
    """cuda.bindings.driver. Raises RuntimeError if it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise RuntimeError("the hopper kernels need cuda-bindings: pip install mokfx[cuda]") from error


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or RuntimeError with the driver's name for what went wrong."""
    code, *values = result
    if int(code) != 0:
        name = bindings().cuGetErrorName(code)[1]
        raise RuntimeError(f"the CUDA driver answered {name.decode() if isinstance(name, bytes) else name}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def load(device: int, source: str = "forward", options: tuple[str, ...] = ()) -> Any:
    """The kernels of one source file as a module on a device, whose context must be current."""
    return check(bindings().cuModuleLoadData(build(source, "sm_90a", options).cubin.read_bytes()))


@functools.cache
def kernel(device: int, name: str, options: tuple[str, ...] = (), source: str = "forward") -> Any:
    """One kernel of a source file, allowed to take all of a multiprocessor's shared memory."""
    driver = bindings()
    function = check(driver.cuModuleGetFunction(load(device, source, options), name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, attribute, SHARED_BYTES))
    return function


@functools.lru_cache(maxsize=8192)
def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A tiled TMA map of bf16 values in boxes of 64 x 64 (x 1), swizzled by 128 bytes.

    `sizes` counts values, innermost first; `strides` are those of the outer dimensions, in values.
    """
    driver = bindings()
    rank = len(sizes)
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            rank,
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride * 2) for stride in strides],
            [driver.cuuint32_t(box) for box in (BOX, BOX, 1)[:rank]],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)


def launch(function: Any, blocks: int, params: ctypes.Structure, stream: int) -> None:
    """One cooperative launch of `blocks` blocks with one argument."""
    argument = ctypes.c_void_p(ctypes.addressof(params))
    result = bindings().cuLaunchCooperativeKernel(
        function, blocks, 1, 1, THREADS, 1, 1, SHARED_BYTES, stream, ctypes.addressof(argument)
    )
    if int(result[0]) != 0 and (reason := fault()):
        raise RuntimeError(f"mok.moe: a kernel gave up and took the CUDA context with it: {reason}")
    check(result)
