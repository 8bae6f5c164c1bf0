"""On several ranks: explained, compiled and broken graphs of an expert-parallel layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

import mokfx
from mokfx.demo_model import MoE
from tests.ranks import run_ranks


def _explanations(rank: int) -> tuple[str, str, float]:
    """The report under plain torch.compile and under mokfx.compile, and the latter's difference to eager."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    model = MoE(8, 12, num_experts=4, top_k=2, group=group).double()
    x = torch.randn(5 + rank, 8, dtype=torch.float64)
    plain = mokfx.explain(model, x)
    compiled = mokfx.compile(model, options={"mok.compiler": "aot_eager"})
    difference = (compiled(x) - model(x)).abs().max().item()
    return str(plain), str(mokfx.explain(compiled, x)), difference


def test_explain_on_two_ranks() -> None:
    (broken, whole, difference), (_, _, other) = run_ranks(2, _explanations)
    assert max(difference, other) < 1e-12
    assert_expected_inline(
        broken,
        """\
mokfx: no MoE layer was rewritten, 3 left alone (7 graphs, 3 graph breaks; 52 nodes)

left alone:
  demo_model.py:85 `sent = counts.view(self.ranks, local).sum(1).tolist()`: the graph broke
      here, after demo_model.py:66 chose the experts and before they were combined (Operator
      `aten._local_scalar_dense.default` has a non-Tensor output whose value is dependent on the
      data of Tensor inputs); compile with fullgraph=True or with mokfx.compile(model), which
      capture sizes that depend on data
  demo_model.py:87 `rows = all_to_all_single_autograd(rows, received, sent, group)`: the graph
      that holds this all-to-all has no router, and its splits are constants: the graph broke
      between the two; compile with fullgraph=True or with mokfx.compile(model), which capture
      sizes that depend on data
  demo_model.py:92 `return all_to_all_single_autograd(rows[order.argsort()], sent, received,
      group)`: the graph that holds this all-to-all has no router, and its splits are constants:
      the graph broke between the two; compile with fullgraph=True or with mokfx.compile(model),
      which capture sizes that depend on data

graph breaks:
  demo_model.py:85 `sent = counts.view(self.ranks, local).sum(1).tolist()`: Operator
      `aten._local_scalar_dense.default` has a non-Tensor output whose value is dependent on the
      data of Tensor inputs.
  demo_model.py:86 `received = arriving.sum(1).tolist()`: Operator
      `aten._local_scalar_dense.default` has a non-Tensor output whose value is dependent on the
      data of Tensor inputs.
  demo_model.py:78 `parts = rows.split(counts.tolist())`: Operator
      `aten._local_scalar_dense.default` has a non-Tensor output whose value is dependent on the
      data of Tensor inputs.""",
    )
    assert whole.startswith("mokfx: 1 MoE layer became mok.moe (1 graph; ")
    assert "2 ranks of group '0'" in whole
