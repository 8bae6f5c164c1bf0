"""Argument checks: each error says what was found, what was expected, and of which argument.

Sizes may be symbolic: a comparison then adds a guard, or a run-time check if the size depends on data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mokfx.ops.activations import ACTIVATIONS
from mokfx.ops.arguments import TENSORS, Call, is_stacked
from mokfx.ops.exchange import group_size

GATE_UP = ("apart", "gate_up", "up_gate", "interleaved")
WEIGHT_ON = ("output", "hidden", "input")
CAPACITY_ORDER = ("choice", "token")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Size = int | torch.SymInt


def check(call: Call) -> None:
    """Everything that can be known without reading a tensor's values; works on fake tensors.

    Raises:
        TypeError: a tensor's dtype.
        ValueError: a shape, a device, a setting, or a group that does not exist.
    """
    _check_settings(call)
    _check_tokens(call)
    experts = _local_experts(call)
    hidden = call.x.shape[1]
    _check_given(call)
    _check_layer(call.w_down, "w_down", 2, experts, (None, hidden), "[I, H]")
    inner = call.w_down[0].shape[-2]
    first = inner if call.gate_up == "apart" else 2 * inner
    columns = "I" if call.gate_up == "apart" else "2I"
    for name in ("w_gate", "w_up"):
        _check_layer(getattr(call, name), name, 2, experts, (hidden, first), f"[H, {columns}]")
    for name in ("b_gate", "b_up"):
        _check_layer(getattr(call, name) or (), name, 1, experts, (first,), f"[{columns}]")
    _check_layer(call.b_down or (), "b_down", 1, experts, (hidden,), "[H]")
    _check_shared(call, hidden)
    _check_dtypes_and_devices(call)


def check_gradient(grad_y: Tensor, call: Call) -> None:
    """`grad_y` has y's shape, dtype and device. Raises as `check`."""
    _check_shape(grad_y, "grad_y", (call.x.shape[0], call.x.shape[1]), "[T, H]")
    if grad_y.dtype != call.y_dtype:
        raise TypeError(f"mok.moe: grad_y has dtype {grad_y.dtype}, expected y's dtype {call.y_dtype}")
    if grad_y.device != call.x.device:
        raise ValueError(f"mok.moe: grad_y is on {grad_y.device}, but x is on {call.x.device}")


def check_ids(call: Call) -> None:
    """Every id is -1 or an expert's. Waits for the device.

    Raises:
        ValueError: an id is out of range.
    """
    if call.topk_ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(call.topk_ids))
    if low < -1 or high >= call.num_experts:
        wrong = low if low < -1 else high
        raise ValueError(
            f"mok.moe: topk_ids contains {wrong}; an id must be in [0, {call.num_experts}), "
            "or -1 for a dropped slot"
        )


def _check_settings(call: Call) -> None:
    for name, valid in (
        ("activation", tuple(ACTIVATIONS)),
        ("gate_up", GATE_UP),
        ("weight_on", WEIGHT_ON),
        ("capacity_order", CAPACITY_ORDER),
    ):
        value = getattr(call, name)
        if value not in valid:
            raise ValueError(f"mok.moe: unknown {name} {value!r}; it must be one of {', '.join(valid)}")
    wanted = ACTIVATIONS[call.activation].arguments
    if len(call.activation_args) != len(wanted):
        raise ValueError(
            f"mok.moe: activation {call.activation!r} takes activation_args [{', '.join(wanted)}], "
            f"got {list(call.activation_args)}"
        )
    if isinstance(call.capacity, int) and call.capacity < 0:
        raise ValueError(f"mok.moe: capacity is {call.capacity}, expected at least 0, or None for no limit")
    if call.out_dtype is not None and call.out_dtype not in DTYPES:
        raise TypeError(f"mok.moe: out_dtype is {call.out_dtype}, expected {_names(DTYPES)}")


def _check_tokens(call: Call) -> None:
    _check_dims(call.x, "x", 2, "[T, H]")
    for name in ("topk_ids", "topk_weights"):
        _check_dims(getattr(call, name), name, 2, "[T, k]")
    tokens, choices = call.x.shape[0], call.topk_ids.shape[1]
    if isinstance(choices, int) and choices == 0:
        raise ValueError(
            "mok.moe: topk_ids has shape [T, 0]; a token needs at least one choice (use -1 to drop it)"
        )
    _check_shape(call.topk_ids, "topk_ids", (tokens, choices), "[T, k] with x's T")
    _check_shape(call.topk_weights, "topk_weights", (tokens, choices), "[T, k], as topk_ids")
    if call.x.dtype not in DTYPES:
        raise TypeError(f"mok.moe: x has dtype {call.x.dtype}, expected {_names(DTYPES)}")
    if call.topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"mok.moe: topk_ids has dtype {call.topk_ids.dtype}, expected torch.int32 or torch.int64"
        )
    if call.topk_weights.dtype not in DTYPES:
        raise TypeError(
            f"mok.moe: topk_weights has dtype {call.topk_weights.dtype}, expected {_names(DTYPES)}"
        )


def _local_experts(call: Call) -> int:
    if call.num_experts < 1:
        raise ValueError(f"mok.moe: num_experts is {call.num_experts}, expected at least 1")
    ranks = group_size(call.group_name)
    if call.num_experts % ranks:
        raise ValueError(
            f"mok.moe: num_experts is {call.num_experts}, which does not divide evenly among the "
            f"{ranks} ranks of group {call.group_name!r}"
        )
    return call.num_experts // ranks


def _check_given(call: Call) -> None:
    """The activation and the layout decide which of the first layer's arguments are given."""
    gated, fused = ACTIVATIONS[call.activation].gated, call.gate_up != "apart"
    if fused and not gated:
        raise ValueError(
            f"mok.moe: activation {call.activation!r} has no gate, so gate_up must be 'apart', "
            f"got {call.gate_up!r}"
        )
    kind = f"activation {call.activation!r} with gate_up={call.gate_up!r}"
    needed = {"w_gate": gated, "w_up": not fused, "w_down": True}
    for name, wanted in needed.items():
        if bool(getattr(call, name)) != wanted:
            raise ValueError(f"mok.moe: {kind} {'needs' if wanted else 'takes no'} {name}")
    for weight, bias in (("w_gate", "b_gate"), ("w_up", "b_up")):
        if getattr(call, bias) and not needed[weight]:
            raise ValueError(f"mok.moe: {kind} takes no {bias}")


def _check_layer(
    layer: Sequence[Tensor], name: str, dims: int, experts: int, shape: Sequence[Size | None], text: str
) -> None:
    """`layer` is [], one stacked tensor, or a list of `experts` tensors, each of `shape` (None: any size)."""
    if not layer:
        return
    stacked = is_stacked(layer, dims)
    if stacked:
        _equal(layer[0].shape[0], experts, lambda: _count_text(layer, name, experts, text))
    elif len(layer) != experts or any(tensor.dim() != dims for tensor in layer):
        raise ValueError(_count_text(layer, name, experts, text))
    expected = tuple(layer[0].shape[d - dims] if size is None else size for d, size in enumerate(shape))
    if stacked:
        _check_shape(layer[0], name, (layer[0].shape[0], *expected), f"[E/R, {text[1:]}")
    else:
        for index, tensor in enumerate(layer):
            _check_shape(tensor, f"{name}[{index}]", expected, text)


def _count_text(layer: Sequence[Tensor], name: str, experts: int, text: str) -> str:
    if len(layer) == 1:
        found = f"one tensor of shape {list(layer[0].shape)}"
    else:
        shapes = [str(list(tensor.shape)) for tensor in layer[:3]]
        found = f"{len(layer)} tensors of shapes {', '.join(shapes)}{', ...' if len(layer) > 3 else ''}"
    return (
        f"mok.moe: {name} is {found}; for the {experts} expert(s) of this rank (num_experts / ranks) "
        f"it must be one tensor [{experts}, {text[1:]} or {experts} of {text}"
    )


def _check_shared(call: Call, hidden: Size) -> None:
    given = [n for n in TENSORS if n.startswith("shared_") and getattr(call, n) is not None]
    if not given:
        return
    gate, up, down = call.shared_w_gate, call.shared_w_up, call.shared_w_down
    if gate is None or down is None:
        missing = "shared_w_gate" if gate is None else "shared_w_down"
        raise ValueError(f"mok.moe: {given[0]} is given without {missing}; a shared expert needs both layers")
    _check_dims(down, "shared_w_down", 2, "[S, H]")
    width = down.shape[0]
    _check_shape(down, "shared_w_down", (width, hidden), "[S, H]")
    if up is None:
        _check_shape(
            gate, "shared_w_gate", (hidden, 2 * width), "[H, 2S], gate and up fused, as shared_w_up is None"
        )
    else:
        _check_shape(gate, "shared_w_gate", (hidden, width), "[H, S]")
        _check_shape(up, "shared_w_up", (hidden, width), "[H, S]")
    if call.shared_sigmoid is not None:
        _check_shape(call.shared_sigmoid, "shared_sigmoid", (hidden, 1), "[H, 1]")


def _check_dtypes_and_devices(call: Call) -> None:
    for name in TENSORS:
        value = getattr(call, name)
        for tensor in (value,) if isinstance(value, Tensor) else value or ():
            if tensor.device != call.x.device:
                raise ValueError(f"mok.moe: {name} is on {tensor.device}, but x is on {call.x.device}")
            if name not in ("x", "topk_ids", "topk_weights") and tensor.dtype != call.x.dtype:
                raise TypeError(
                    f"mok.moe: {name} has dtype {tensor.dtype}, expected x's dtype {call.x.dtype}"
                )


def _check_dims(tensor: Tensor, name: str, dims: int, text: str) -> None:
    if tensor.dim() != dims:
        raise ValueError(f"mok.moe: {name} has shape {list(tensor.shape)}, expected {text}")


def _check_shape(tensor: Tensor, name: str, shape: tuple[Size, ...], text: str) -> None:
    _check_dims(tensor, name, len(shape), text)
    for found, expected in zip(tensor.shape, shape, strict=True):
        _equal(
            found,
            expected,
            lambda: f"mok.moe: {name} has shape {list(tensor.shape)}, expected {list(shape)} ({text})",
        )


def _equal(found: Size, expected: Size, message: Callable[[], str]) -> None:
    if isinstance(found, int) and isinstance(expected, int):
        if found != expected:
            raise ValueError(message())
    else:
        torch._check_value(found == expected, message)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join([", ".join(str(dtype) for dtype in dtypes[:-1]), str(dtypes[-1])])
