"""Texts to pin: the same as long as the meaning is."""

from __future__ import annotations

from expecttest import assert_expected_inline

from mokfx.testing import normalised

REPORT = """\
mokfx: 2 MoE layers became mok.moe (1 graph; 106 nodes, now 34)

model.py:35 `y = rows.sum(1)`
  ranks     2 ranks of group '7'
  sizes     tokens 3*s77 + s12, hidden 64, top-k 2
  replaced  97 nodes by `moe_default`

model.py:35 `y = rows.sum(1)`
  ranks     2 ranks of group '9'
  sizes     tokens s12, hidden 64, top-k 2
  replaced  97 nodes by `moe_default_1`

left alone:
  model.py:57 `z`: a reason that names `linear_7`"""


def test_a_report() -> None:
    assert_expected_inline(
        normalised(REPORT),
        """\
mokfx: 2 MoE layers became mok.moe (1 graph)

model.py `y = rows.sum(1)`
  ranks     2 ranks of group 'group0'
  sizes     tokens 3*s0 + s1, hidden 64, top-k 2

model.py `y = rows.sum(1)`
  ranks     2 ranks of group 'group1'
  sizes     tokens s1, hidden 64, top-k 2

left alone:
  model.py `z`: a reason that names `linear_7`""",
    )


GRAPH = """\
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[s77, 64]", w_0: "f32[64, 64]", add_1: "f32[64]"):
        linear_7: "f32[s77, 64]" = torch._C._nn.linear(x, w_0, None)
        getitem_3: "Sym(u4)" = x[0]
        linear_31: "f32[u4, 64]" = torch._C._nn.linear(linear_7, w_0, None)
        add_4: "f32[u4, 64]" = linear_31 + add_1
        topk = add_4.topk(2)
        add_9 = add_4 + linear_7
        return (add_9, topk)"""


def test_a_graph_whose_names_count_what_is_elsewhere() -> None:
    assert_expected_inline(
        normalised(GRAPH),
        """\
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[s0, 64]", w_0: "f32[64, 64]", add_1: "f32[64]"):
        linear: "f32[s0, 64]" = torch._C._nn.linear(x, w_0, None)
        getitem: "Sym(u0)" = x[0]
        linear_1: "f32[u0, 64]" = torch._C._nn.linear(linear, w_0, None)
        add: "f32[u0, 64]" = linear_1 + add_1
        topk = add.topk(2)
        add_9 = add + linear
        return (add_9, topk)""",
    )


def test_equal_graphs_are_equal_texts_and_others_are_not() -> None:
    elsewhere = GRAPH.replace("linear_31", "linear_40").replace("u4", "u17").replace("s77", "s3")
    assert elsewhere != GRAPH
    assert normalised(elsewhere) == normalised(GRAPH)
    assert normalised(GRAPH.replace("linear_31 +", "linear_7 +")) != normalised(GRAPH)
    assert normalised(normalised(GRAPH)) == normalised(GRAPH)
