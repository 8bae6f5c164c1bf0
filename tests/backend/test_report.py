"""The text of a report, and the code of a graph."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule

from mokfx.passes.outcome import Match, Miss
from mokfx.readable import readable
from mokfx.report import GraphBreak, GraphReport, Report

MATCH = Match(
    where="model.py:41",
    code="return (rows * weights.unsqueeze(-1)).sum(1)",
    node="moe",
    group="0",
    ranks=4,
    tokens="s0",
    hidden="2048",
    intermediate="768",
    num_experts="128",
    top_k="8",
    router="softmax, top-8, renormalised",
    dispatch="argsort, all-to-all with splits from the counts of each expert",
    experts="swiglu, three grouped products",
    combine="all-to-all, inverse permutation, weighted sum over the choices of each token, in their order",
    shared="swiglu of width 768 with a sigmoid gate",
    kept=("router logits", "counts"),
    erased=118,
)
MISS = Miss("I do not know what this makes of rows sorted by expert", "model.py:57", "rows.cumsum(0)", "cumsum")
BREAK = GraphBreak("Dynamo does not know print.", "model.py:60", "print(x)")


def graph(*, matches: tuple[Match, ...] = (), misses: tuple[Miss, ...] = ()) -> GraphReport:
    return GraphReport(matches, misses, "before", "after", nodes_before=130, nodes_after=12, seconds=0.1)


def test_all_at_once() -> None:
    first = graph(matches=(MATCH,), misses=(MISS,))
    second = GraphReport((), (MISS,), "before", "after", 3, 3, 0.0, ended_by=BREAK)
    assert_expected_inline(
        str(Report((first, second), (GraphBreak("Dynamo gave up.", ""),))),
        """\
mokfx: 1 MoE layer became mok.moe, 1 left alone (2 graphs, 2 graph breaks; 133 nodes, now 15)

model.py:41 `return (rows * weights.unsqueeze(-1)).sum(1)`
  router    softmax, top-8, renormalised
  dispatch  argsort, all-to-all with splits from the counts of each expert
  experts   swiglu, three grouped products
  combine   all-to-all, inverse permutation, weighted sum over the choices of each token, in
            their order
  shared    swiglu of width 768 with a sigmoid gate
  ranks     4 ranks of group '0'
  sizes     tokens s0, hidden 2048, intermediate 768, experts 128, top-k 8
  kept      router logits, counts
  replaced  118 nodes by `moe`

left alone:
  model.py:57 `rows.cumsum(0)`: I do not know what this makes of rows sorted by expert

graph breaks:
  (place unknown): Dynamo gave up.
  model.py:60 `print(x)`: Dynamo does not know print.""",
    )


def test_nothing() -> None:
    assert str(Report(())) == "mokfx: no MoE layer was rewritten (0 graphs; 0 nodes)"
    assert str(graph(misses=(MISS,))).splitlines()[0] == (
        "mokfx: no MoE layer was rewritten, 1 left alone (1 graph; 130 nodes)"
    )


def test_what_several_graphs_say_is_joined() -> None:
    report = Report((graph(matches=(MATCH,), misses=(MISS,)), graph(misses=(MISS,))))
    assert report.matches == (MATCH,)
    assert report.misses == (MISS,), "the same one is told once"
    assert report.graph_before == "# graph 1 of 2\nbefore\n\n# graph 2 of 2\nbefore"
    assert Report(report.graphs[:1]).graph_after == "after"


def code(function: object, *inputs: Tensor) -> str:
    codes: list[str] = []

    def backend(gm: GraphModule, example_inputs: list[Tensor]) -> object:
        codes.append(readable(gm))
        return gm.forward

    torch.compile(function, backend=backend)(*inputs)  # type: ignore[call-overload]
    return codes[0]


def test_code_is_short_and_holds_no_paths() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    assert_expected_inline(
        code(model, torch.randn(4, 2)),
        """\
class GraphModule(torch.nn.Module):
    def forward(
        self,
        module_0_weight: "f32[3, 2]",
        module_0_bias: "f32[3]",
        args_0: "f32[4, 2]",
        module_1_weight: "f32[2, 3]",
        module_1_bias: "f32[2]",
    ):
        input_1: "f32[4, 3]" = torch._C._nn.linear(args_0, module_0_weight, module_0_bias)
        input_2: "f32[4, 2]" = torch._C._nn.linear(input_1, module_1_weight, module_1_bias)
        return (input_2,)""",
    )


def test_code_of_a_nested_graph() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)

    def model(x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        y[0] = 0.0
        return y

    assert_expected_inline(
        code(model, torch.randn(4, 2)),
        """\
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[4, 2]", layer_weight: "f32[2, 2]"):
        wrap_body_0 = self.wrap_body_0
        tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint(wrap_body_0, x,
            layer_weight, use_reentrant = False)
        y: "f32[4, 2]" = tag_activation_checkpoint[0]
        y[0] = 0.0;  setitem = y
        return (y,)
    class wrap_body_0(torch.nn.Module):
        def forward(self, x: "f32[4, 2]", layer_weight: "f32[2, 2]"):
            linear: "f32[4, 2]" = torch._C._nn.linear(x, layer_weight, None)
            return (linear,)""",
    )
