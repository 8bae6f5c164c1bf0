"""Pin in a test of your own project that its MoE layer is recognised, and as what.

    python examples/pin_a_match.py                       run the tests
    EXPECTTEST_ACCEPT=1 python examples/pin_a_match.py    rewrite the expected texts below

When a change of the model (or of mokfx, or of torch) makes the layer something else, the test says what.
"""

from __future__ import annotations

import unittest

import torch
from expecttest import TestCase
from quickstart import Model

import mokfx


class TestModel(TestCase):
    def test_the_moe_layer_is_recognised(self) -> None:
        report = mokfx.explain(mokfx.compile(Model()), torch.randn(16, 64))
        self.assertExpectedInline(
            str(report),
            """\
mokfx: 1 MoE layer became mok.moe (1 graph; 106 nodes, now 34)

quickstart.py:35 `return (outputs * weights.unsqueeze(-1)).sum(1)`
  router    linear -> softmax -> top-2
  dispatch  sorted by expert
  experts   swiglu, a product for each expert, gate and up apart
  combine   put back in order, summed over the choices, router weight on the output
  ranks     one rank
  sizes     tokens 16, hidden 64, intermediate 128, experts 8, top-k 2
  replaced  97 nodes by `moe_default`""",
        )

    def test_nothing_is_left_of_it_but_the_call(self) -> None:
        report = mokfx.explain(mokfx.compile(Model()), torch.randn(16, 64))
        self.assertEqual(report.graph_after.count("torch.ops.mok.moe"), 1)
        for gone in ("argsort", "one_hot", ".item()", "silu"):
            self.assertNotIn(gone, report.graph_after)

    def test_it_fails_loudly_if_it_is_not(self) -> None:
        compiled = mokfx.compile(Model(), options={"mok.on_miss": "raise"})
        compiled(torch.randn(16, 64))


if __name__ == "__main__":
    unittest.main()
