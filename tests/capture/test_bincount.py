"""`torch.bincount(ids, minlength=E).tolist()`: E numbers, or a clear error at run time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.capture.harness import Compiled, nothing

E = 4


def by_keyword(x: Tensor, ids: Tensor) -> Tensor:
    parts = x[ids.argsort(stable=True)].split(torch.bincount(ids, minlength=E).tolist())
    return torch.cat([part * e for e, part in enumerate(parts)])


def by_position(x: Tensor, ids: Tensor) -> Tensor:
    counts = torch.bincount(ids, None, E)
    parts = x[ids.argsort(stable=True)].split(counts.tolist())
    return torch.cat([part * e for e, part in enumerate(parts)])


def by_method(x: Tensor, ids: Tensor) -> Tensor:
    counts = ids.bincount(minlength=E)
    sizes = counts.cpu().tolist()
    return torch.cat([part * e for e, part in enumerate(x[ids.argsort(stable=True)].split(sizes))])


def by_iteration(x: Tensor, ids: Tensor) -> Tensor:
    parts, start = [], 0
    rows = x[ids.argsort(stable=True)]
    for e, count in enumerate(torch.bincount(ids, minlength=E)):
        end = start + count.item()
        parts.append(rows[start:end] * e)
        start = end
    return torch.cat(parts)


SPELLINGS = [by_keyword, by_position, by_method, by_iteration]


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_one_graph_for_any_ids(function) -> None:
    compiled = Compiled(function, nothing)
    for ids in ([0, 1, 2, 3, 2, 1], [3, 3, 3, 3, 3, 3], [0, 0, 1, 1, 0, 1]):
        x = torch.randn(6, 2)
        assert torch.equal(compiled(x, torch.tensor(ids)), function(x, torch.tensor(ids)))
    assert (len(compiled.graphs), compiled.reasons, compiled.markers) == (1, [], [])
    assert len(compiled.nodes(torch.bincount, "bincount")) == 1


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_an_id_past_the_last_expert_is_a_clear_error(function) -> None:
    compiled = Compiled(function, nothing)
    x = torch.randn(6, 2)
    compiled(x, torch.tensor([0, 1, 2, 3, 2, 1]))
    message = r"test_bincount\.py:\d+: torch\.bincount met an id that is not below its minlength=4"
    with pytest.raises(RuntimeError, match=message):
        compiled(x, torch.tensor([0, 1, 2, 4, 2, 1]))
    with pytest.raises(RuntimeError, match="bincount only supports 1-d non-negative integral inputs"):
        compiled(x, torch.tensor([0, 1, 2, -1, 2, 1]))


def test_no_token() -> None:
    compiled = Compiled(by_keyword, nothing)
    x, ids = torch.randn(0, 2), torch.zeros(0, dtype=torch.long)
    assert torch.equal(compiled(x, ids), by_keyword(x, ids))


def test_without_minlength_the_length_stays_unknown() -> None:
    def without(x: Tensor, ids: Tensor) -> Tensor:
        return torch.cat(x[ids.argsort()].split(torch.bincount(ids).tolist()))

    compiled = Compiled(without, nothing, fullgraph=False)
    for ids in ([0, 1, 2], [4, 0, 0]):
        x = torch.randn(3, 2)
        assert torch.equal(compiled(x, torch.tensor(ids)), without(x, torch.tensor(ids)))
    assert not any(
        "minlength" in node.args[1] for node in compiled.nodes(torch.ops.aten._assert_scalar.default)
    )


def test_weights_are_counted_too() -> None:
    def weighted(ids: Tensor, weights: Tensor) -> Tensor:
        return torch.stack(list(torch.bincount(ids, weights, minlength=E)))

    compiled = Compiled(weighted, nothing)
    ids, weights = torch.tensor([0, 3, 3]), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    assert torch.equal(compiled(ids, weights), weighted(ids, weights))
