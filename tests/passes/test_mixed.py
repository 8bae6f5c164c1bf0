"""Layers of experts without a top-k of each token are left alone and say so; models without experts say nothing."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import TestCase

from .composed import outcome_of
from .mixed import HIDDEN, TAKEN_BY_EXPERTS, TO_ALL_EXPERTS, TOKENS, Stacked
from .ordinary import ORDINARY, Model


def table(mixes: Sequence[Callable[..., Any]]) -> str:
    """For each layer its reason, and the line below."""
    rows: list[str] = []
    for mix in mixes:
        outcome = outcome_of(Stacked(mix), torch.randn(TOKENS, HIDDEN, requires_grad=True)).outcome
        assert not outcome.matches
        (miss,) = outcome.misses
        file, line = miss.where.split(":")
        assert file == "mixed.py" and int(line) > 0
        rows += [f"{mix.__name__}:", *textwrap.wrap(miss.reason, 100), f"    {miss.code}"]
    return "\n".join(rows)


class Reasons(TestCase):
    maxDiff = None

    def test_experts_that_choose(self) -> None:
        self.assertExpectedInline(
            table(TAKEN_BY_EXPERTS),
            """\
taken_index_add:
the experts choose their tokens (`tokens`): a token's experts are not the top-k of its own scores,
which is what the op computes
    weights, tokens = torch.topk(m.scores(x).t(), TAKEN, dim=1)
taken_scatter_add:
the experts choose their tokens (`tokens`): a token's experts are not the top-k of its own scores,
which is what the op computes
    weights, tokens = m.scores(x).topk(TAKEN, dim=0)  # [C, E]
taken_one_hot:
the experts choose their tokens (`tokens`): a token's experts are not the top-k of its own scores,
which is what the op computes
    weights, tokens = torch.topk(m.scores(x).t(), TAKEN, dim=-1)
taken_sorted:
the experts choose their tokens (`argsort`): a token's experts are not the top-k of its own scores,
which is what the op computes
    tokens = scores.argsort(dim=-1, descending=True)[:, :TAKEN]
taken_one_by_one:
the experts choose their tokens (`tokens`): a token's experts are not the top-k of its own scores,
which is what the op computes
    weights, tokens = scores[:, e].topk(TAKEN)
taken_in_rows:
the experts choose their tokens (`tokens`): a token's experts are not the top-k of its own scores,
which is what the op computes
    weights, tokens = torch.topk(m.scores(x).t(), TAKEN, dim=1)
taken_of_batches:
the experts choose their tokens (`tokens`): a token's experts are not the top-k of its own scores,
which is what the op computes
    weights, tokens = torch.topk(m.scores(batch).transpose(1, 2), TAKEN // 2, dim=-1)  # [B, E, C]""",
        )

    def test_mixtures_of_all(self) -> None:
        self.assertExpectedInline(
            table(TO_ALL_EXPERTS),
            """\
soft_einsum:
the experts are given mixtures of all tokens, weighed by `softmax`: no token is sent to its top-k
experts, which is what the op does
    return torch.einsum("te,eh->th", logits.softmax(1), m.ffn(rows).squeeze(1))
soft_slots:
the experts are given mixtures of all tokens, weighed by `dispatch`: no token is sent to its top-k
experts, which is what the op does
    return combine @ m.ffn(rows).reshape(-1, HIDDEN)
soft_loop:
the experts are given mixtures of all tokens, weighed by `softmax`: no token is sent to its top-k
experts, which is what the op does
    return logits.softmax(1) @ out
dense_einsum:
every token goes to every expert, weighed by `softmax`: the op needs the top-k of each token
    return torch.einsum("te,eth->th", m.scores(x), out)
dense_sum:
every token goes to every expert, weighed by `softmax`: the op needs the top-k of each token
    return (m.scores(x).unsqueeze(-1) * out).sum(dim=1)
dense_loop:
every token goes to every expert, weighed by `scores`: the op needs the top-k of each token
    y = y + scores[:, e : e + 1] * expert(x)
dense_bmm:
every token goes to every expert, weighed by `softmax`: the op needs the top-k of each token
    return torch.bmm(m.scores(x).unsqueeze(1), out).squeeze(1)""",
        )


@pytest.mark.parametrize("run", ORDINARY, ids=lambda run: run.__name__)
def test_ordinary_models(run: Callable[[Any, torch.Tensor], torch.Tensor], monkeypatch: Any) -> None:
    """Each is read, also where nothing in it routes."""
    monkeypatch.setattr(importlib.import_module("mokfx.passes.rewrite"), "may_hold_layer", lambda module: True)
    outcome = outcome_of(Model(run), torch.randn(16, HIDDEN, requires_grad=True)).outcome
    assert not outcome.matches
    assert not outcome.misses
