"""R ranks give the bits of one rank with the concatenated batch: y, dx, d_topk_weights, routed gradients."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mokfx.ops import OP
from mokfx.ops.activations import ACTIVATIONS
from tests.ops.caches import no_graph_caches
from tests.ops.cases import Case, Inputs, build
from tests.ranks import run_ranks

EXPERT_LAYERS = ("b_gate", "b_up", "b_down")
WIDE = Case(tokens=23, hidden=64, inner=48, experts=8, choices=3, dtype=torch.float32)
ODD = Case(
    tokens=41, hidden=33, inner=17, experts=4, dtype=torch.float32, biases=True, shared="apart+sigmoid"
)

CASES = [
    Case(),
    WIDE,
    ODD,
    replace(ODD, dtype=torch.bfloat16, weights_dtype=torch.float32, transposed=True),
    replace(ODD, dtype=torch.float16, shared="fused", listed=True),
    replace(WIDE, listed=True, transposed=True, gate_up="interleaved", activation="clamped_swiglu"),
    replace(WIDE, dtype=torch.bfloat16, out_dtype=torch.float32, gate_up="up_gate", biases=True),
    replace(WIDE, dropped=0.4, shared="fused+sigmoid"),
    replace(WIDE, only=(5,), choices=1),
    replace(WIDE, only=(0, 7), choices=2, weight_on="hidden", dropped=0.2),
    replace(WIDE, weight_on="input", ids_dtype=torch.int32),
    replace(WIDE, dropped=1.0, shared="apart"),
    *(replace(ODD, activation=name, weight_on="hidden") for name in ACTIVATIONS),
]


def _world() -> str:
    group = dist.group.WORLD
    assert group is not None
    return group.group_name


def _gradients(inputs: Inputs, grad_y: Tensor) -> tuple[Tensor, Inputs]:
    """y, and the gradients in the places of their tensors."""
    leaves = inputs.require_grad()
    y = OP(*leaves.args, **leaves.settings)
    found = iter(torch.autograd.grad(y, leaves.leaves(), grad_y))
    by_leaf = {id(leaf): next(found) for leaf in leaves.leaves()}
    return y.detach(), leaves.map(lambda t: by_leaf.get(id(t), t))


def _part(inputs: Inputs, tokens: slice, experts: slice) -> Inputs:
    """One rank's share: its tokens and its experts; the shared expert is everywhere."""

    def share(layer: list[Tensor]) -> list[Tensor]:
        stacked = len(layer) == 1
        return [layer[0][experts].clone()] if stacked else layer[experts]

    settings = dict(inputs.settings)
    settings |= {name: share(settings[name]) for name in EXPERT_LAYERS if settings.get(name)}
    rows = [value[tokens] for value in inputs.args[:3]]
    return Inputs(rows + [share(layer) if layer else [] for layer in inputs.args[3:]], settings)


def _differences(found: Inputs, wanted: Inputs, sums: bool) -> list[str]:
    """Names of the tensors whose bits differ; of the shared expert too if `sums`."""
    names = ["x", "topk_ids", "topk_weights", "w_gate", "w_up", "w_down"]
    pairs = list(zip(names, found.args, wanted.args, strict=True))
    pairs += [
        (name, value, wanted.settings[name])
        for name, value in found.settings.items()
        if isinstance(value, Tensor | list) and (sums or name in EXPERT_LAYERS)
    ]
    wrong = []
    for name, a, b in pairs:
        these, those = (a, b) if isinstance(a, list) else ([a], [b])
        if len(these) != len(those) or not all(map(_same, these, those)):
            wrong.append(name)
    return wrong


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def _splits(tokens: int, ranks: int) -> list[list[int]]:
    """Ways to divide tokens: evenly, one rank without any, all on one rank, at random."""
    even = [tokens // ranks + (r < tokens % ranks) for r in range(ranks)]
    cuts = sorted(random.Random(ranks).choices(range(tokens + 1), k=ranks - 1))
    uneven = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
    first_empty = [0, *(tokens // (ranks - 1) + (r < tokens % (ranks - 1)) for r in range(ranks - 1))]
    return [even, uneven, first_empty, [0] * (ranks - 1) + [tokens]]


def _compare_with_one_rank(rank: int) -> int:
    ranks, group = dist.get_world_size(), _world()
    compared = 0
    for case in CASES:
        inputs = build(case)
        grad_y = torch.randn(case.tokens, case.hidden, generator=torch.Generator().manual_seed(3))
        grad_y = grad_y.to(case.out_dtype or case.dtype)
        y, gradients = _gradients(inputs, grad_y)
        for split in _splits(case.tokens, ranks):
            tokens = slice(sum(split[:rank]), sum(split[: rank + 1]))
            size = case.experts // ranks
            experts = slice(rank * size, (rank + 1) * size)
            mine = _part(inputs, tokens, experts)
            mine.settings["group_name"] = group
            found_y, found = _gradients(mine, grad_y[tokens])
            wrong = _differences(found, _part(gradients, tokens, experts), sums=False)
            wrong += [] if torch.equal(found_y, y[tokens]) else ["y"]
            assert not wrong, f"{wrong} differ for {case} split {split}"
            compared += 1
    return compared


def _sums_of_shared_gradients(rank: int) -> None:
    """The shared expert's gradients are those of the rank's own tokens: they add up to one rank's."""
    case = Case(shared="fused+sigmoid", tokens=20)
    inputs, grad_y = build(case), torch.ones(20, 8, dtype=torch.float64)
    _, whole = _gradients(inputs, grad_y)
    ranks = dist.get_world_size()
    size, count = case.experts // ranks, case.tokens // ranks
    tokens = slice(rank * count, (rank + 1) * count)
    mine = _part(inputs, tokens, slice(rank * size, (rank + 1) * size))
    mine.settings["group_name"] = _world()
    _, found = _gradients(mine, grad_y[tokens])
    for name in ("shared_w_gate", "shared_w_down", "shared_sigmoid"):
        dist.all_reduce(found.settings[name])
        torch.testing.assert_close(found.settings[name], whole.settings[name], rtol=1e-12, atol=1e-12)


def _capacity_counts_a_ranks_own_slots(rank: int) -> None:
    case = Case(capacity=2, tokens=12, choices=2)
    parts = [build(case, seed=r) for r in range(dist.get_world_size())]
    weights = build(case).args[3:]
    alone = Inputs([*parts[rank].args[:3], *weights], parts[rank].settings)
    size = case.experts // dist.get_world_size()
    mine = _part(alone, slice(None), slice(rank * size, (rank + 1) * size))
    mine.settings["group_name"] = _world()
    grad_y = torch.ones(12, 8, dtype=torch.float64)
    y, gradients = _gradients(mine, grad_y)
    alone_y, alone_gradients = _gradients(alone, grad_y)
    torch.testing.assert_close(y, alone_y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients.args[0], alone_gradients.args[0], rtol=1e-12, atol=1e-12)


def _stacked_equals_listed(rank: int) -> None:
    for case in (WIDE, replace(ODD, transposed=True)):
        results = []
        for listed in (False, True):
            size = case.experts // dist.get_world_size()
            full = build(replace(case, listed=listed))
            mine = _part(full, slice(rank, None), slice(rank * size, (rank + 1) * size))
            mine.settings["group_name"] = _world()
            results.append(_gradients(mine, torch.ones_like(mine.args[0])))
        (y, stacked), (y_listed, listed_gradients) = results
        assert torch.equal(y, y_listed)
        assert torch.equal(stacked.args[0], listed_gradients.args[0])
        for one, many in zip(stacked.args[3:], listed_gradients.args[3:], strict=True):
            assert torch.equal(one[0], torch.stack(many))


def _compiled_trains(rank: int) -> None:
    """Different token counts on the ranks, at last none on one: its call must not be optimised away."""
    case = replace(ODD, dtype=torch.float64)
    size = case.experts // dist.get_world_size()
    experts = slice(rank * size, (rank + 1) * size)
    settings: dict[str, Any] = {}

    def layer(x: Tensor, ids: Tensor, probabilities: Tensor, *weights: list[Tensor]) -> Tensor:
        return OP(x.sin(), ids, probabilities * 2, *weights, **settings).cos()

    compiled = torch.compile(layer, backend="inductor", fullgraph=True, dynamic=True)
    for count in (41, 30, 11, 0):
        mine = _part(build(case), slice(count if rank else 41), experts).require_grad()
        settings = mine.settings | {"group_name": _world()}
        y, expected = compiled(*mine.args), layer(*mine.args)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(y.sum(), mine.leaves())
        wanted = torch.autograd.grad(expected.sum(), mine.leaves())
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _refuses(rank: int) -> list[str]:
    messages = []
    inputs = build(Case())
    inputs.settings["group_name"] = _world()
    for change in ({"num_experts": 5}, {}):
        try:
            OP(*inputs.args, **(inputs.settings | change))
        except ValueError as error:
            messages.append(str(error).replace(repr(_world()), "NAME"))
    return messages


def _everything(rank: int) -> tuple[int, list[str]]:
    compared = _compare_with_one_rank(rank)
    _sums_of_shared_gradients(rank)
    _capacity_counts_a_ranks_own_slots(rank)
    _stacked_equals_listed(rank)
    if dist.get_world_size() == 2:
        with no_graph_caches():
            _compiled_trains(rank)
    return compared, _refuses(rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_rank(ranks: int) -> None:
    for compared, messages in run_ranks(ranks, _everything):
        assert compared == 4 * len(CASES)
        assert messages == [
            f"mok.moe: num_experts is 5, which does not divide evenly among the {ranks} ranks of group NAME",
            f"mok.moe: w_down is one tensor of shape [4, 6, 8]; for the {4 // ranks} expert(s) of this rank "
            f"(num_experts / ranks) it must be one tensor [{4 // ranks}, I, H] or {4 // ranks} of [I, H]",
        ]


def _subgroups(rank: int) -> None:
    """Two groups of two ranks, each with all the experts: a call talks to its own group alone."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, place = groups[rank // 2], rank % 2
    inputs = build(WIDE, seed=rank // 2)
    grad_y = torch.ones(WIDE.tokens, WIDE.hidden)
    y, _ = _gradients(inputs, grad_y)
    tokens = slice(0, 9) if place == 0 else slice(9, None)
    mine = _part(inputs, tokens, slice(place * 4, place * 4 + 4))
    mine.settings["group_name"] = group.group_name
    found_y, _ = _gradients(mine, grad_y[tokens])
    assert torch.equal(found_y, y[tokens])


def _alone(rank: int) -> None:
    inputs = build(ODD)
    grad_y = torch.ones(ODD.tokens, ODD.hidden)
    y, gradients = _gradients(inputs, grad_y)
    inputs.settings["group_name"] = _world()
    found_y, found = _gradients(inputs, grad_y)
    del found.settings["group_name"]
    assert torch.equal(found_y, y) and not _differences(found, gradients, sums=True)


def test_a_group_of_one() -> None:
    run_ranks(1, _alone)


def test_groups_inside_the_world() -> None:
    run_ranks(4, _subgroups)
