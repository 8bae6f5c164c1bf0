"""The text of every error that a wrong call of the op gives."""

from __future__ import annotations

import textwrap
from typing import Any

import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mokfx.ops import OP
from tests.ops.cases import Case, build

BACKWARD = torch.ops.mok.moe_backward.default
PLACES = ("x", "topk_ids", "topk_weights", "w_gate", "w_up", "w_down")


def ones(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def refused(op: Any, args: list[Any], settings: dict[str, Any]) -> str:
    """The kind and the text of the error that a call raises."""
    try:
        op(*args, **settings)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the call was not refused")


def refusal(case: Case = Case(), **changes: Any) -> str:  # noqa: B008
    """That of a call of `case` (T = 11, k = 2, E = 4, H = 8, I = 6) with some arguments changed."""
    inputs = build(case)
    for name, value in changes.items():
        if name in PLACES:
            inputs.args[PLACES.index(name)] = value
        else:
            inputs.settings[name] = value
    return refused(OP, inputs.args, inputs.settings)


def report(**refusals: str) -> str:
    """One paragraph for each."""
    lines = []
    for name, text in refusals.items():
        lines += [name, *textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines)


class TestErrors(TestCase):
    def test_tokens(self) -> None:
        none = ones(11, 0)
        self.assertExpectedInline(
            report(
                x_shape=refusal(x=ones(2, 11, 8)),
                x_dtype=refusal(x=ones(11, 8, dtype=torch.int32)),
                ids_shape=refusal(topk_ids=ones(11, dtype=torch.long)),
                ids_of_other_tokens=refusal(topk_ids=ones(10, 2, dtype=torch.long)),
                ids_dtype=refusal(topk_ids=ones(11, 2)),
                no_choices=refusal(topk_ids=none.long(), topk_weights=none),
                weights_shape=refusal(topk_weights=ones(11, 3)),
                weights_dtype=refusal(topk_weights=ones(11, 2, dtype=torch.long)),
                weights_device=refusal(topk_weights=ones(11, 2, device="meta")),
            ),
            """\
x_shape
  ValueError: mok.moe: x has shape [2, 11, 8], expected [T, H]
x_dtype
  TypeError: mok.moe: x has dtype torch.int32, expected torch.float64, torch.float32, torch.bfloat16
  or torch.float16
ids_shape
  ValueError: mok.moe: topk_ids has shape [11], expected [T, k]
ids_of_other_tokens
  ValueError: mok.moe: topk_ids has shape [10, 2], expected [11, 2] ([T, k] with x's T)
ids_dtype
  TypeError: mok.moe: topk_ids has dtype torch.float64, expected torch.int32 or torch.int64
no_choices
  ValueError: mok.moe: topk_ids has shape [T, 0]; a token needs at least one choice (use -1 to drop
  it)
weights_shape
  ValueError: mok.moe: topk_weights has shape [11, 3], expected [11, 2] ([T, k], as topk_ids)
weights_dtype
  TypeError: mok.moe: topk_weights has dtype torch.int64, expected torch.float64, torch.float32,
  torch.bfloat16 or torch.float16
weights_device
  ValueError: mok.moe: topk_weights is on meta, but x is on cpu""",
        )

    def test_ids_out_of_range(self) -> None:
        inputs = build(Case())
        inputs.args[1] = torch.full((11, 2), 7)
        self.assertExpectedInline(
            report(
                too_high=refusal(topk_ids=torch.full((11, 2), 4)),
                too_low=refusal(topk_ids=torch.full((11, 2), -2)),
                in_the_backward=refused(BACKWARD, [ones(11, 8), *inputs.args], inputs.settings),
            ),
            """\
too_high
  ValueError: mok.moe: topk_ids contains 4; an id must be in [0, 4), or -1 for a dropped slot
too_low
  ValueError: mok.moe: topk_ids contains -2; an id must be in [0, 4), or -1 for a dropped slot
in_the_backward
  ValueError: mok.moe: topk_ids contains 7; an id must be in [0, 4), or -1 for a dropped slot""",
        )

    def test_settings(self) -> None:
        self.assertExpectedInline(
            report(
                activation=refusal(activation="swish"),
                gate_up=refusal(gate_up="fused"),
                weight_on=refusal(weight_on="router"),
                capacity_order=refusal(capacity_order="slot"),
                capacity=refusal(capacity=-1),
                out_dtype=refusal(out_dtype=torch.int8),
                activation_args_missing=refusal(activation="clamped_swiglu"),
                activation_args_unwanted=refusal(activation_args=[1.0]),
                num_experts=refusal(num_experts=0),
            ),
            """\
activation
  ValueError: mok.moe: unknown activation 'swish'; it must be one of swiglu, geglu, geglu_tanh,
  reglu, clamped_swiglu, limited_swiglu, silu, gelu, gelu_tanh, relu, relu_squared
gate_up
  ValueError: mok.moe: unknown gate_up 'fused'; it must be one of apart, gate_up, up_gate,
  interleaved
weight_on
  ValueError: mok.moe: unknown weight_on 'router'; it must be one of output, hidden, input
capacity_order
  ValueError: mok.moe: unknown capacity_order 'slot'; it must be one of choice, token
capacity
  ValueError: mok.moe: capacity is -1, expected at least 0, or None for no limit
out_dtype
  TypeError: mok.moe: out_dtype is torch.int8, expected torch.float64, torch.float32, torch.bfloat16
  or torch.float16
activation_args_missing
  ValueError: mok.moe: activation 'clamped_swiglu' takes activation_args [alpha, limit], got []
activation_args_unwanted
  ValueError: mok.moe: activation 'swiglu' takes activation_args [], got [1.0]
num_experts
  ValueError: mok.moe: num_experts is 0, expected at least 1""",
        )

    def test_which_layers_are_given(self) -> None:
        self.assertExpectedInline(
            report(
                gate_missing=refusal(w_gate=[]),
                gate_unwanted=refusal(activation="relu"),
                up_unwanted=refusal(gate_up="gate_up"),
                fused_without_a_gate=refusal(activation="relu", gate_up="up_gate"),
                bias_of_no_layer=refusal(Case(activation="relu"), b_gate=[ones(4, 6)]),
                down_missing=refusal(w_down=[]),
            ),
            """\
gate_missing
  ValueError: mok.moe: activation 'swiglu' with gate_up='apart' needs w_gate
gate_unwanted
  ValueError: mok.moe: activation 'relu' with gate_up='apart' takes no w_gate
up_unwanted
  ValueError: mok.moe: activation 'swiglu' with gate_up='gate_up' takes no w_up
fused_without_a_gate
  ValueError: mok.moe: activation 'relu' has no gate, so gate_up must be 'apart', got 'up_gate'
bias_of_no_layer
  ValueError: mok.moe: activation 'relu' with gate_up='apart' takes no b_gate
down_missing
  ValueError: mok.moe: activation 'swiglu' with gate_up='apart' needs w_down""",
        )

    def test_number_of_experts(self) -> None:
        self.assertExpectedInline(
            report(
                stacked=refusal(num_experts=5),
                listed=refusal(Case(listed=True), num_experts=3),
                vectors=refusal(w_up=[ones(8)] * 4),
                biases=refusal(b_up=[ones(6)] * 2),
            ),
            """\
stacked
  ValueError: mok.moe: w_down is one tensor of shape [4, 6, 8]; for the 5 expert(s) of this rank
  (num_experts / ranks) it must be one tensor [5, I, H] or 5 of [I, H]
listed
  ValueError: mok.moe: w_down is 4 tensors of shapes [6, 8], [6, 8], [6, 8], ...; for the 3
  expert(s) of this rank (num_experts / ranks) it must be one tensor [3, I, H] or 3 of [I, H]
vectors
  ValueError: mok.moe: w_up is 4 tensors of shapes [8], [8], [8], ...; for the 4 expert(s) of this
  rank (num_experts / ranks) it must be one tensor [4, H, I] or 4 of [H, I]
biases
  ValueError: mok.moe: b_up is 2 tensors of shapes [6], [6]; for the 4 expert(s) of this rank
  (num_experts / ranks) it must be one tensor [4, I] or 4 of [I]""",
        )

    def test_sizes_of_experts(self) -> None:
        self.assertExpectedInline(
            report(
                layers_disagree=refusal(w_up=[ones(4, 8, 7)]),
                wrong_hidden_size=refusal(w_gate=[ones(4, 9, 6)]),
                as_nn_linear_stores_it=refusal(w_down=[ones(4, 8, 6)]),
                half_of_a_fused_layer=refusal(gate_up="interleaved", w_gate=[ones(4, 8, 6)], w_up=[]),
                one_of_a_list=refusal(Case(listed=True), w_up=[ones(8, 6 + (e == 2)) for e in range(4)]),
                bias=refusal(b_down=[ones(4, 6)]),
                dtype=refusal(w_down=[ones(4, 6, 8, dtype=torch.float32)]),
                device=refusal(w_down=[ones(4, 6, 8, device="meta")]),
            ),
            """\
layers_disagree
  ValueError: mok.moe: w_up has shape [4, 8, 7], expected [4, 8, 6] ([E/R, H, I])
wrong_hidden_size
  ValueError: mok.moe: w_gate has shape [4, 9, 6], expected [4, 8, 6] ([E/R, H, I])
as_nn_linear_stores_it
  ValueError: mok.moe: w_down has shape [4, 8, 6], expected [4, 8, 8] ([E/R, I, H])
half_of_a_fused_layer
  ValueError: mok.moe: w_gate has shape [4, 8, 6], expected [4, 8, 12] ([E/R, H, 2I])
one_of_a_list
  ValueError: mok.moe: w_up[2] has shape [8, 7], expected [8, 6] ([H, I])
bias
  ValueError: mok.moe: b_down has shape [4, 6], expected [4, 8] ([E/R, H])
dtype
  TypeError: mok.moe: w_down has dtype torch.float32, expected x's dtype torch.float64
device
  ValueError: mok.moe: w_down is on meta, but x is on cpu""",
        )

    def test_shared_expert(self) -> None:
        case = Case(shared="apart")
        self.assertExpectedInline(
            report(
                half_of_it=refusal(shared_w_gate=ones(8, 6)),
                sigmoid_alone=refusal(shared_sigmoid=ones(8, 1)),
                down=refusal(case, shared_w_down=ones(9, 7)),
                widths_disagree=refusal(case, shared_w_up=ones(8, 10)),
                not_fused=refusal(case, shared_w_up=None),
                sigmoid_shape=refusal(case, shared_sigmoid=ones(8)),
                dtype=refusal(case, shared_sigmoid=ones(8, 1, dtype=torch.float32)),
            ),
            """\
half_of_it
  ValueError: mok.moe: shared_w_gate is given without shared_w_down; a shared expert needs both
  layers
sigmoid_alone
  ValueError: mok.moe: shared_sigmoid is given without shared_w_gate; a shared expert needs both
  layers
down
  ValueError: mok.moe: shared_w_down has shape [9, 7], expected [9, 8] ([S, H])
widths_disagree
  ValueError: mok.moe: shared_w_up has shape [8, 10], expected [8, 9] ([H, S])
not_fused
  ValueError: mok.moe: shared_w_gate has shape [8, 9], expected [8, 18] ([H, 2S], gate and up fused,
  as shared_w_up is None)
sigmoid_shape
  ValueError: mok.moe: shared_sigmoid has shape [8], expected [H, 1]
dtype
  TypeError: mok.moe: shared_sigmoid has dtype torch.float32, expected x's dtype torch.float64""",
        )

    def test_gradient(self) -> None:
        inputs = build(Case())

        def gradient(grad_y: Tensor) -> str:
            return refused(BACKWARD, [grad_y, *inputs.args], inputs.settings)

        self.assertExpectedInline(
            report(
                shape=gradient(ones(11, 9)),
                dtype=gradient(ones(11, 8, dtype=torch.float32)),
                device=gradient(ones(11, 8, device="meta")),
            ),
            """\
shape
  ValueError: mok.moe: grad_y has shape [11, 9], expected [11, 8] ([T, H])
dtype
  TypeError: mok.moe: grad_y has dtype torch.float32, expected y's dtype torch.float64
device
  ValueError: mok.moe: grad_y is on meta, but x is on cpu""",
        )

    def test_group(self) -> None:
        before = refusal(group_name="experts")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        try:
            world = dist.group.WORLD
            assert world is not None
            name = world.group_name
            found = report(
                nothing_initialised=before,
                no_such_group=refusal(group_name="experts"),
                uneven=refusal(group_name=name, num_experts=6).replace(repr(name), "NAME"),
                too_many_local_experts=refusal(group_name=name),
            )
        finally:
            dist.destroy_process_group()
        self.assertExpectedInline(
            found,
            """\
nothing_initialised
  ValueError: mok.moe: no process group named 'experts' exists in this process; pass
  group.group_name of an initialised group, or None for one rank
no_such_group
  ValueError: mok.moe: no process group named 'experts' exists in this process; pass
  group.group_name of an initialised group, or None for one rank
uneven
  ValueError: mok.moe: num_experts is 6, which does not divide evenly among the 4 ranks of group
  NAME
too_many_local_experts
  ValueError: mok.moe: w_down is one tensor of shape [4, 6, 8]; for the 1 expert(s) of this rank
  (num_experts / ranks) it must be one tensor [1, I, H] or 1 of [I, H]""",
        )
