"""The definition of `mok::moe` and `mok::moe_backward`: what a call says, and what each argument means.

`mok::moe` returns `y` `[T, H]`, contiguous, of dtype `out_dtype`: for every token the weighted sum of the outputs of
its chosen experts, plus the shared expert's output if there is one. Both ops are functional.

T is the number of tokens on this rank, k the choices a token has, H the hidden size, I an expert's width, E the
number of experts of all ranks, R the number of ranks of the group. A slot is a (token, choice) pair.

===================== =============================================================================================
`x`                   `[T, H]`, float64, float32, bfloat16 or float16, any strides. T may be 0 and differ by rank.
`topk_ids`            `[T, k]` int32 or int64: the expert of each slot, in [0, E); -1 drops the slot.
`topk_weights`        `[T, k]`, any of the float dtypes. A dropped slot's weight has gradient 0.
`w_gate` `w_up`       First layer of the local experts, used as `x @ w`: one stacked tensor `[E/R, H, I]` or E/R matrices
                      `[H, I]`, of x's dtype and of any strides; never copied as a whole. `w_gate` is `[]` if the
                      activation is not gated; `w_up` is `[]` if gate and up are fused (then `w_gate` has 2I columns).
`w_down`              Second layer: one `[E/R, I, H]` or E/R matrices `[I, H]`.
`b_gate` `b_up`       Biases of the first layer, laid out as its weights: one `[E/R, I]` or E/R vectors `[I]` (2I fused).
                      `[]` or None: no bias.
`b_down`              Bias of the second layer: one `[E/R, H]` or E/R vectors `[H]`; `[]` or None: no bias.
`shared_w_gate`       Shared expert (swiglu of any width S, replicated on all ranks, applied to each token): `[H, S]`, or
`shared_w_up`         `[H, 2S]` with gate first and `shared_w_up` None;
`shared_w_down`       `[S, H]`.
`shared_sigmoid`      `[H, 1]`: the shared expert's output is multiplied by `sigmoid(x @ shared_sigmoid)`.
`num_experts`         E. Expert e lives on rank `e // (E/R)` of the group.
`gate_up`             "apart"; or fused in `w_gate`: "gate_up" (gate columns first), "up_gate" (up columns first),
                      "interleaved" (even columns gate, odd columns up).
`activation`          Gated: "swiglu", "geglu" (erf), "geglu_tanh", "reglu", "clamped_swiglu"; else "silu", "gelu",
                      "gelu_tanh", "relu", "relu_squared".
`activation_args`     "clamped_swiglu": `[alpha, limit]`; else `[]`.
`weight_on`           Where a slot's weight is applied: "output" of the expert, its "hidden" (activated) rows, or its "input".
`capacity`            A slot is dropped if at least this many earlier slots of the same rank chose the same expert.
`capacity_order`      What earlier means: "choice" (all first choices in token order, then all second ones) or "token"
                      (by slot number `token * k + choice`).
`out_dtype`           dtype of y; None: that of x.
`group_name`          Name of the expert-parallel process group, whose ranks must all make the call; None: one rank.
===================== =============================================================================================

`mok::moe_backward(grad_y, ...)` takes `grad_y` `[T, H]` (y's dtype) and the same arguments, and returns the gradients
`[dx, d_topk_weights, *d_w_gate, *d_w_up, *d_w_down, *d_b_gate, *d_b_up, *d_b_down, ...]`, then the present ones of
`d_shared_w_gate`, `d_shared_w_up`, `d_shared_w_down`, `d_shared_sigmoid`. Each has its input's shape and dtype; `dx` and
`d_topk_weights` are contiguous, the others have the strides that `torch.empty_like(input)` gives, so the gradient of a
transposed view of a parameter is a transposed view of a contiguous tensor. The shared expert's are of this rank alone.

Numbers: a product's operands are of x's dtype and it accumulates in float32 (float64 for float64); the activated rows h
and each slot's output are rounded to x's dtype; the weighted sum adds in float32 (float64) in choice order, then adds the
shared expert's output, itself rounded to x's dtype; y is rounded once. Same bits from run to run, and for R ranks
with T_r tokens as for one rank with all of them in rank order (`y`, `dx`, `d_topk_weights`, routed experts' gradients).
"""

from __future__ import annotations

import torch

_ARGUMENTS = """
    Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] w_gate, Tensor[] w_up, Tensor[] w_down, *,
    Tensor[]? b_gate=None, Tensor[]? b_up=None, Tensor[]? b_down=None,
    Tensor? shared_w_gate=None, Tensor? shared_w_up=None, Tensor? shared_w_down=None,
    Tensor? shared_sigmoid=None,
    int num_experts, str gate_up="apart", str activation="swiglu", float[] activation_args=[],
    str weight_on="output", SymInt? capacity=None, str capacity_order="choice",
    ScalarType? out_dtype=None, str? group_name=None
"""

LIBRARY = torch.library.Library("mok", "DEF")
LIBRARY.define(f"moe({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(f"moe_backward(Tensor grad_y, {_ARGUMENTS}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))

MOE: torch._ops.OpOverload = torch.ops.mok.moe.default
MOE_BACKWARD: torch._ops.OpOverload = torch.ops.mok.moe_backward.default
