"""The definition of `mok::moe` and of its forward and backward: what a call says, and what each argument means.

`mok::moe` returns `y` `[T, H]`, contiguous, of dtype `out_dtype`: for every token the weighted sum of the
outputs of its chosen experts, plus the shared expert's output if there is one. All ops are functional.

Letters: T tokens on this rank, k choices of a token, H hidden size, I an expert's width, S the shared
expert's, E experts of all ranks, R ranks of the group. A slot is a (token, choice) pair.

x
    `[T, H]`, float64, float32, bfloat16 or float16, any strides. T may be 0 and may differ between ranks.
topk_ids
    `[T, k]`, int32 or int64: the expert of each slot, in [0, E). -1 drops the slot.
topk_weights
    `[T, k]`, any of those float dtypes. The weight of a dropped slot has gradient 0.
w_gate, w_up
    First layer of this rank's experts, used as `x @ w`: one stacked tensor `[E/R, H, I]` or E/R matrices
    `[H, I]`, of x's dtype and any strides (a transposed view is the normal case). `w_gate` is [] if the
    activation is not gated. `w_up` is [] if `gate_up` says that both are in `w_gate`, of 2I columns.
w_down
    Second layer: one stacked tensor `[E/R, I, H]` or E/R matrices `[I, H]`.
b_gate, b_up, b_down
    Biases, laid out as the weights: stacked `[E/R, I]` (2I fused; H for `b_down`) or E/R vectors.
    [] or None: none.
shared_w_gate, shared_w_up, shared_w_down
    Shared expert, swiglu, the same on every rank and applied to every token: `[H, S]`, `[H, S]`, `[S, H]`; or
    `shared_w_up` None and `shared_w_gate` `[H, 2S]` with the gate's columns first.
shared_sigmoid
    `[H, 1]`: the shared expert's output is multiplied by `sigmoid(x @ shared_sigmoid)`.
num_experts
    E. Expert e lives on rank `e // (E/R)`.
gate_up
    "apart", or fused in `w_gate`: "gate_up" (gate columns, then up columns), "up_gate" (up first),
    "interleaved" (even columns gate, odd ones up).
activation
    Gated: "swiglu" silu(g)*u, "geglu" gelu(g)*u, "geglu_tanh", "reglu" relu(g)*u, "clamped_swiglu",
    "limited_swiglu". Not gated: "silu", "gelu", "gelu_tanh", "relu", "relu_squared".
activation_args
    "clamped_swiglu" takes [alpha, limit] and is g*sigmoid(alpha*g)*(u+1) of g = min(g, limit) and u clamped
    to [-limit, limit]. "limited_swiglu" takes [limit] and is silu(g)*u of g and u clamped so. The others take [].
weight_on
    Where a slot's weight is applied: to the "output" of the expert, to its "hidden" rows (before the second
    layer), or to its "input".
capacity
    A slot is dropped if at least this many earlier slots of the same rank chose the same expert.
    None: no limit.
capacity_order
    What earlier means: "choice" (all first choices in token order, then all second choices, ...) or "token"
    (by slot number, token * k + choice).
out_dtype
    dtype of y. None: x's.
group_name
    Name of the expert-parallel process group; each of its ranks must make the call. None: one rank.

`mok::moe_forward(...)` is what runs in place of `mok::moe` where a gradient will be asked for: it returns
`(y, saved)`, the same y and what the provider keeps for the backward besides the arguments: of x's dtype, of two
dimensions or more, in a shape that the provider names; `[0]` if it keeps nothing.

`mok::moe_backward(grad_y, ..., saved=None)` takes `grad_y` `[T, H]` of y's dtype, the same arguments, and what
`mok::moe_forward` saved; without it the provider computes that again. It returns
`[dx, d_topk_weights, *d_w_gate, *d_w_up, *d_w_down, *d_b_gate, *d_b_up, *d_b_down]` and then those of
`[d_shared_w_gate, d_shared_w_up, d_shared_w_down, d_shared_sigmoid]` that have an input. Each has its input's
shape and dtype. `dx` and `d_topk_weights` are contiguous; the others have the strides of
`torch.empty_like(input)`, so the gradient of a transposed view of a parameter is a transposed view as well.
The shared expert's gradients are those of this rank's tokens.

Numbers. A product's operands are of x's dtype; it accumulates in float32 (float64 if x is float64). The
activated rows and each slot's output are rounded to x's dtype. The weighted sum adds in float32 (float64) in
choice order, then adds the shared expert's output, which was rounded to x's dtype; y is rounded once. The
same bits come from run to run, and from R ranks with T_r tokens as from one rank with all of them in rank
order: y, dx, d_topk_weights and the gradients of the routed experts. (On a CPU: with the same number of
threads.)
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
LIBRARY.define(f"moe_forward({_ARGUMENTS}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"moe_backward(Tensor grad_y, {_ARGUMENTS}, Tensor? saved=None) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)

MOE: torch._ops.OpOverload = torch.ops.mok.moe.default
MOE_FORWARD: torch._ops.OpOverload = torch.ops.mok.moe_forward.default
MOE_BACKWARD: torch._ops.OpOverload = torch.ops.mok.moe_backward.default

# The call is a rendezvous: every rank must make it, also one whose result is empty or unused. Else Inductor
# folds a call with T = 0 into an empty constant, and the other ranks wait for this one.
for _op in (MOE, MOE_FORWARD, MOE_BACKWARD):
    torch.fx.node.has_side_effect(_op)
