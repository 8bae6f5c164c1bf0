"""What the pictures say: the parts of a layer and the meaning of each value, as they are read by people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import mokfx
from mokfx import Report
from mokfx.page.picture import Drawing, LayerPicture

from ..spellings.layer import build
from ..spellings.spelling import Spelling
from . import models


def told(drawing: Drawing) -> str:
    """A line a step: stage, what it calls, how often, and what it means."""
    lines = []
    for step in drawing.steps:
        times = f" x{step.count}" if step.count > 1 else ""
        kept = " (kept)" if step.kept else ""
        lines.append(f"{step.stage:8} {step.op or step.name}{times}: {step.meaning}{kept}".rstrip(": "))
    return "\n".join(lines)


def layer_of(report: Report) -> LayerPicture:
    (picture,) = (picture for graph in report.graphs for picture in graph.pictures.layers)
    return picture


def spelled(dtype: torch.dtype = torch.float64, **choices: Any) -> LayerPicture:
    layer = build(Spelling(**choices), dtype=dtype)
    return layer_of(mokfx.explain(mokfx.compile(layer), *layer.example()))


def test_a_loop_over_modules() -> None:
    model, args = models.Loop(16, 24, 4, 2), (torch.randn(8, 16),)
    picture = layer_of(mokfx.explain(mokfx.compile(model), *args))
    assert_expected_inline(told(picture.before), """\
input    x: the layer's input: the tokens
router   linear: router logits: a score for each expert
router   softmax: router probabilities
router   topk: the best experts of each token, and their scores
router   getitem: router weights
router   getitem: the experts of each token
dispatch flatten: the expert of each slot
dispatch argsort: the slot at each place, in expert order
dispatch one_hot: 1 where a slot chose the expert, else 0
dispatch sum: slots of each expert
dispatch getitem x4: slots of each expert
dispatch item x4: slots of each expert
dispatch floordiv: the token of each row, in expert order
dispatch getitem: rows of x, in expert order
dispatch split
dispatch getitem x4: rows of x, for each expert
experts  linear x4: gate projection, for each expert
experts  silu x4: silu of the gate projection, for each expert
experts  linear x4: up projection, for each expert
experts  mul x4: hidden: silu(gate) * up, for each expert
experts  linear x4: expert outputs, for each expert
combine  cat: expert outputs, in expert order
combine  argsort: each slot's place in expert order
combine  getitem: expert outputs, slot by slot
combine  view: expert outputs, a row for each token and choice
combine  unsqueeze: router weights, a row for each token and choice
combine  mul: expert outputs times the router weight, a row for each token and choice
combine  sum: the layer's output: the MoE of x
outside  return""")
    assert_expected_inline(told(picture.after), """\
input    x: the layer's input: the tokens
router   linear: router logits: a score for each expert
router   softmax: router probabilities
router   topk: the best experts of each token, and their scores
router   getitem: router weights
router   getitem: the experts of each token
op       mok.moe: 65 nodes in one call, forward and backward
outside  return""")
    assert picture.before.unseen > 0


def test_ranks_and_a_shared_expert(report_of: Callable[[str], Report]) -> None:
    picture = layer_of(report_of("deepseek_like"))
    assert_expected_inline(told(picture.before), """\
input    x: the layer's input: the tokens
router   view: the tokens, token by token
router   float: the tokens, token by token
router   float
router   linear: router logits: a score for each expert
router   sigmoid: router probabilities
router   add: corrected for balance
router   view
router   topk x2: the highest scores, and where they are
router   getitem x2
router   sum
router   ones
router   scatter
router   unsqueeze
router   masked_fill
router   flatten
router   topk: the best experts of each token, and their scores
router   getitem: the experts of each token
router   gather: the chosen ones
router   sum
router   truediv: renormalised
router   mul: router weights
dispatch flatten: the expert of each slot
dispatch argsort: the slot at each place, in expert order
dispatch flatten: the expert of each slot
dispatch bincount: slots of each expert
dispatch size
dispatch getitem
dispatch floordiv
dispatch all_to_all_single: rows that each rank sends to this rank's experts
dispatch wait_tensor: rows that each rank sends to this rank's experts
dispatch view: rows that each rank sends to this rank's experts
dispatch view: slots of each expert
dispatch sum: rows for each rank
dispatch getitem x8: a number of rows
dispatch item x8: a number of rows
dispatch sum: rows from each rank
dispatch getitem x8: rows from one rank
dispatch item x8: rows from one rank
dispatch floordiv: the token of each row, in expert order
dispatch getitem: rows of x, in expert order
dispatch all_to_all_single: rows of x, as received from the ranks
dispatch wait_tensor: rows of x, as received from the ranks
dispatch arange: 0, 1, 2, ...
dispatch repeat: 0, 1, 2, ...
dispatch flatten: rows that each rank sends to this rank's experts
dispatch sym_sum: a number of rows
dispatch repeat_interleave: which of this rank's experts each received row is for
dispatch argsort: the received row at each place, by local expert
dispatch sum: received rows of each local expert
dispatch cumsum: where the rows of each expert end
dispatch int: where the rows of each expert end
dispatch getitem: rows of x, received, by local expert
experts  _grouped_mm: gate and up projections, received, by local expert
experts  chunk
experts  getitem x2: gate and up projections, received, by local expert
experts  silu: silu of the gate projection, received, by local expert
experts  mul: hidden: silu(gate) * up, received, by local expert
experts  _grouped_mm: expert outputs, received, by local expert
combine  argsort: where each received row went
combine  getitem: expert outputs, as received from the ranks
combine  all_to_all_single: expert outputs, in expert order
combine  wait_tensor: expert outputs, in expert order
combine  argsort: each slot's place in expert order
combine  getitem: expert outputs, slot by slot
combine  view: expert outputs, a row for each token and choice
combine  float: expert outputs, a row for each token and choice
combine  unsqueeze: router weights, a row for each token and choice
combine  mul: expert outputs times the router weight, a row for each token and choice
combine  sum: each token's expert outputs, weighted and summed
combine  type_as: the MoE of x, token by token
shared   linear: shared expert: gate projection
shared   silu: shared expert: silu of the gate projection
shared   linear: shared expert: up projection
shared   mul: shared expert: silu(gate) * up
shared   linear: shared expert: down projection
combine  add: the layer's output: the MoE of x
outside  view: the MoE of x, token by token""")
    sizes = picture.sizes
    assert sizes is not None
    assert (sizes.tokens, sizes.ranks, sizes.shared, sizes.dtype) == (512, 8, 256, "bfloat16")


def test_capacity() -> None:
    assert_expected_inline(told(spelled(whole="einsum_gshard", products="padded_bmm").before), """\
input    x: the layer's input: the tokens
router   linear: router logits: a score for each expert
router   softmax: router probabilities
router   topk: the best experts of each token, and their scores
router   getitem: router weights
router   getitem: the experts of each token
dispatch getitem x2: the expert of each slot
dispatch one_hot x2: 1 where a slot chose the expert, else 0
dispatch cumsum: how many slots up to this one chose the same expert
dispatch sub: how many earlier slots chose the same expert
dispatch cumsum: how many slots up to this one chose the same expert
dispatch sub: how many earlier slots chose the same expert
dispatch sum: slots of each expert
dispatch iadd: how many earlier slots chose the same expert
dispatch lt: 1 where the place is within the capacity
dispatch mul: 1 where a slot chose the expert and is within its capacity
dispatch lt: 1 where the place is within the capacity
dispatch mul: 1 where a slot chose the expert and is within its capacity
dispatch zeros: zeros, to be filled
dispatch mul: each slot's place among the rows of its expert, 0 if dropped
dispatch sum: each slot's place among the rows of its expert, 0 if dropped
dispatch one_hot: 1 at each slot's place among the rows of its expert
dispatch unsqueeze: 1 where a slot chose the expert and is within its capacity
dispatch unsqueeze: 1 at each slot's place among the rows of its expert
dispatch mul: 1 at each slot's expert and place, if it is within the capacity
dispatch getitem x2: router weights, token by token
dispatch mul: router weight at each slot's expert and place
dispatch add: router weight at each slot's expert and place
dispatch mul: each slot's place among the rows of its expert, 0 if dropped
dispatch sum: each slot's place among the rows of its expert, 0 if dropped
dispatch one_hot: 1 at each slot's place among the rows of its expert
dispatch unsqueeze: 1 where a slot chose the expert and is within its capacity
dispatch unsqueeze: 1 at each slot's place among the rows of its expert
dispatch mul: 1 at each slot's expert and place, if it is within the capacity
dispatch mul: router weight at each slot's expert and place
dispatch add: router weight at each slot's expert and place
dispatch ne: 1 at each slot's expert and place, if it is within the capacity
dispatch to: 1 at each slot's expert and place, if it is within the capacity
dispatch to: 1 at each slot's expert and place, if it is within the capacity
dispatch einsum: rows of x, in expert order
combine  to: router weight at each slot's expert and place
experts  bmm: gate projection, in expert order
experts  bmm: up projection, in expert order
experts  silu: silu of the gate projection, in expert order
experts  mul: hidden: silu(gate) * up, in expert order
experts  bmm: expert outputs, in expert order
combine  einsum: the layer's output: the MoE of x
combine  to: the layer's output: the MoE of x
outside  return""")


def test_biases_kept_counts_and_a_search_for_tokens() -> None:
    picture = spelled(whole="where_ids", act="clamped", fused="interleaved", bias=True, outputs="y_logits")
    assert_expected_inline(told(picture.before), """\
input    x: the layer's input: the tokens
router   linear: router logits: a score for each expert
router   softmax: router probabilities
router   topk: the best experts of each token, and their scores
router   getitem: router weights
router   getitem: the experts of each token
combine  zeros_like: zeros, to be filled
dispatch eq x8: 1 where a slot chose the expert, else 0
dispatch where x8
dispatch getitem x8: the token of each row, for each expert
combine  getitem x8: which choice each row is, for each expert
combine  getitem: zeros, to be filled
combine  getitem x8: router weights, for each expert
dispatch getitem x8: rows of x, for each expert
experts  getitem x8: the gate matrix
experts  matmul x8: gate and up projections, for each expert
experts  getitem x16
experts  add x8: gate and up projections plus bias, for each expert
experts  getitem x16: gate and up projections plus bias, for each expert
experts  clamp x8: clamp of the gate or up projection, for each expert
experts  clamp x8: clamp of the gate or up projection, for each expert
experts  add x8: shifted by a constant, for each expert
experts  mul x8: scaled, for each expert
experts  sigmoid x8: sigmoid of the gate projection, for each expert
experts  mul x8: gate * sigmoid of it, for each expert
experts  mul x8: hidden: clamped swiglu of gate and up, for each expert
experts  getitem x8: the down matrix
experts  matmul x8: expert outputs, for each expert
combine  add x8: expert outputs, for each expert
combine  mul x8: expert outputs times the router weight, for each expert
combine  to x8: expert outputs times the router weight, for each expert
combine  iadd x8: expert outputs times the router weight, for each expert
combine  setitem x8: the layer's output: the MoE of x
combine  getitem x7: expert outputs times the router weight, for each expert
combine  to: the layer's output: the MoE of x
outside  return""")


def test_near_misses(report_of: Callable[[str], Report]) -> None:
    report = report_of("match_and_misses")
    (graph,) = report.graphs
    first, second = (graph.pictures.misses[miss] for miss in report.misses)
    assert_expected_inline(told(first), """\
known    x
known    add
known    rms_norm
known    linear: router logits: a score for each expert
known    softmax: router probabilities
known    topk: the highest scores, and where they are
known    getitem: the expert of each slot
known    flatten: the expert of each slot
known    argsort: the slot at each place, in expert order
known    one_hot: 1 where a slot chose the expert, else 0
known    sum: slots of each expert
known    getitem x8: slots of each expert
known    item x8: slots of each expert
known    floordiv: the token of each row, in expert order
known    getitem: rows of `rms_norm_1`, in expert order
known    split
known    getitem x8: rows of `rms_norm_1`, for each expert
known    linear x16: computed from routed rows, for each expert
known    silu x8: computed from routed rows, for each expert
known    mul x8: computed from routed rows, for each expert
known    linear x8: computed from routed rows, for each expert
known    cat: computed from routed rows, in expert order
ended    cumsum
unknown  getitem
unknown  view
unknown  mul
unknown  sum
unknown  add
unknown  rms_norm
unknown  linear
unknown  add""")
    assert [step.stage for step in second.steps].count("ended") == 1
    became_one = {match.where for match in report.matches}
    assert became_one.isdisjoint(step.where for step in first.steps if step.stage == "known")


def test_a_graph_without_a_layer_has_no_picture(report_of: Callable[[str], Report]) -> None:
    (graph,) = report_of("dense").graphs
    assert graph.pictures.layers == ()
    assert not graph.pictures.misses


def test_symbolic_tokens_are_those_of_the_call() -> None:
    model = models.Loop(16, 24, 4, 2)
    x = torch.randn(8, 16)
    torch._dynamo.mark_dynamic(x, 0)
    sizes = layer_of(mokfx.explain(mokfx.compile(model), x)).sizes
    assert sizes is not None
    assert sizes.symbolic
    assert sizes.tokens == 8


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"products": "grouped_mm", "fused": "chunk", "storage": "out_in"},
        {"whole": "mask_slots", "shared": "linear_sigmoid"},
        {"whole": "slot", "products": "padded_bmm"},
        {"weight_on": "hidden", "reduce": "index_add"},
    ],
    ids=str,
)
def test_every_node_that_the_call_replaces_is_drawn_or_a_check(choices: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if choices.get("products") == "grouped_mm" else torch.float64
    layer = build(Spelling(**choices), dtype=dtype)
    report = mokfx.explain(mokfx.compile(layer), *layer.example())
    picture = layer_of(report)
    parts = dict.fromkeys(("dispatch", "experts", "shared", "combine"), 0)
    for step in picture.before.steps:
        if step.stage in parts:
            parts[step.stage] += step.count
    (match,) = report.matches
    assert sum(parts.values()) + picture.before.unseen == match.erased + len(match.kept)
    assert all(parts[stage] for stage in ("dispatch", "experts", "combine"))
    assert bool(parts["shared"]) == bool(match.shared)
    (call,) = (step for step in picture.after.steps if step.stage == "op")
    assert call.op == "mok.moe"
    assert call.weights
