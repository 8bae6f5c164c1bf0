"""The rewritten graph and the words of a match, for three layers, as they are read by people."""

from __future__ import annotations

import re
from dataclasses import fields
from textwrap import wrap
from typing import Any

import torch
from expecttest import TestCase

from ..spellings.layer import build
from ..spellings.spelling import Spelling
from .support import compiled

SHORTER = re.compile(r"l_self_|modules_|parameters_|torch\.(ops|nn\.functional|_C\._nn)\.")


def described(spelling: Spelling, dtype: torch.dtype = torch.float64) -> str:
    """The match, a field a line, and the graph's statements, with shorter names."""
    layer = build(spelling, dtype=dtype)
    with compiled(layer) as (function, record):
        function(*layer.example())
    (match,) = record.outcome.matches
    named: dict[str, Any] = {f.name: getattr(match, f.name) for f in fields(match)}
    named["where"] = match.where.split(":")[0]
    words = [f"{name}: {value}" for name, value in named.items() if value]
    code = [line.strip().split(";  ")[0] for line in record.modules[-1].code.splitlines()]
    code = [SHORTER.sub("", line) for line in code if " = " in line and "= L_" not in line]
    wrapped = [part for line in code for part in wrap(line, 100, subsequent_indent="    ")]
    return "\n".join([*words, "", *wrapped]) + "\n"



class Pins(TestCase):
    def test_olmoe(self) -> None:
        products: dict[str, Any] = {"products": "grouped_mm", "storage": "out_in", "fused": "chunk"}
        spelling = Spelling(sort="sort", unsort="by_setitem", batched=True, **products)
        self.assertExpectedInline(described(spelling, torch.bfloat16), """\
where: combine.py
code: return (slots * weights.unsqueeze(-1)).sum(dim=1)
node: moe_default
ranks: 1
tokens: 2 * 8
hidden: 16
intermediate: 24
num_experts: 8
top_k: 2
router: linear -> softmax -> top-2
dispatch: sorted by expert
experts: swiglu, grouped_mm, gate and up fused
combine: written back by index, summed over the choices, router weight on the output
erased: 28

x = l_x_.view(-1, 16)
logits = linear(x, router_weight_)
softmax = softmax(logits, dim = -1)
topk = torch.topk(softmax, 2, dim = -1)
weights = topk[0]
ids = topk[1]
reshape_default = aten.reshape.default(l_x_, [-1, 16])
transpose_int = aten.transpose.int(ffn_up_, -2, -1)
transpose_int_1 = aten.transpose.int(ffn_down_, -2, -1)
moe_default = mok.moe.default(reshape_default, ids, weights, [transpose_int], [], [transpose_int_1],
    num_experts = 8, gate_up = 'gate_up')
y_2 = moe_default.reshape((2, 8, 16))
""")

    def test_mistral_loop(self) -> None:
        spelling = Spelling(whole="where_ids", storage="out_in", shared="linear", outputs="y_logits")
        self.assertExpectedInline(described(spelling), """\
where: shared.py
code: "after": lambda y, shared: y + shared,
node: moe_default
ranks: 1
tokens: 16
hidden: 16
intermediate: 24
num_experts: 8
top_k: 2
router: linear -> softmax -> top-2
dispatch: searched expert by expert
experts: swiglu, a product for each expert, gate and up apart
combine: written back by index, summed over the choices, router weight on the output
shared: swiglu, width 40
erased: 208

logits = linear(l_x_, router_weight_)
softmax = softmax(logits, dim = -1)
topk = torch.topk(softmax, 2, dim = -1)
weights = topk[0]
ids = topk[1]
transpose_int = aten.transpose.int(ffn_gate_, -2, -1)
transpose_int_1 = aten.transpose.int(ffn_up_, -2, -1)
transpose_int_2 = aten.transpose.int(ffn_down_, -2, -1)
transpose_int_3 = aten.transpose.int(shared_gate_weight_, -2, -1)
transpose_int_4 = aten.transpose.int(shared_up_weight_, -2, -1)
transpose_int_5 = aten.transpose.int(shared_down_weight_, -2, -1)
moe_default = mok.moe.default(l_x_, ids, weights, [transpose_int], [transpose_int_1],
    [transpose_int_2], shared_w_gate = transpose_int_3, shared_w_down = transpose_int_5, shared_w_up
    = transpose_int_4, num_experts = 8)
""")

    def test_gpt_oss(self) -> None:
        products: dict[str, Any] = {"products": "padded_bmm", "act": "clamped", "fused": "interleaved"}
        spelling = Spelling(router="topk_softmax", sort="sort", bias=True, **products)
        self.assertExpectedInline(described(spelling), """\
where: combine.py
code: return (slots * weights.unsqueeze(-1)).sum(dim=1)
node: moe_default
ranks: 1
tokens: 16
hidden: 16
intermediate: 24
num_experts: 8
top_k: 2
router: linear with bias -> top-2 -> softmax
dispatch: sorted by expert
experts: clamped_swiglu, batched products, gate and up interleaved, biases
combine: written back by index, summed over the choices, router weight on the output
erased: 41

logits = linear(l_x_, router_weight_, router_bias_)
topk = torch.topk(logits, 2, dim = -1)
values = topk[0]
ids = topk[1]
softmax = softmax(values, dim = 1, dtype = torch.float64)
moe_default = mok.moe.default(l_x_, ids, softmax, [ffn_up_], [], [ffn_down_], b_gate =
    [ffn_up_bias_], b_down = [ffn_down_bias_], num_experts = 8, gate_up = 'interleaved', activation
    = 'clamped_swiglu', activation_args = [1.702, 1.5])
""")
