"""Pin in a test of your own project that its MoE layer is recognised, and as what.

    python examples/pin_a_match.py                        run the tests
    EXPECTTEST_ACCEPT=1 python examples/pin_a_match.py    write the expected texts below anew

When a change of the model (or of mokfx, or of torch) makes the layer something else, the test says what. With pytest,
`pytest_plugins = ["mokfx.testing.plugin"]` in conftest.py has `assert_rewritten` as a fixture.
"""

from __future__ import annotations

import unittest

import torch
from expecttest import TestCase
from quickstart import Model

import mokfx
from mokfx.testing import assert_rewritten, normalised


class TestModel(TestCase):
    def test_the_moe_layer_is_recognised(self) -> None:
        assert_rewritten(
            Model(),
            torch.randn(16, 64),
            expected="""\
mokfx: 1 MoE layer became mok.moe (1 graph)

quickstart.py `return (outputs * weights.unsqueeze(-1)).sum(1)`
  router    linear -> softmax -> top-2
  dispatch  sorted by expert
  experts   swiglu, a product for each expert, gate and up apart
  combine   put back in order, summed over the choices, router weight on the output
  ranks     one rank
  sizes     tokens 16, hidden 64, intermediate 128, experts 8, top-k 2""",
        )

    def test_nothing_is_left_of_it_but_the_call(self) -> None:
        report = assert_rewritten(Model(), torch.randn(16, 64), expected=1)
        self.assertEqual(report.graph_after.count("torch.ops.mok.moe"), 1)
        for gone in ("argsort", "one_hot", ".item()", "silu"):
            self.assertNotIn(gone, report.graph_after)
        ends_with = "\n".join(normalised(report.graph_after).splitlines()[-4:])
        self.assertExpectedInline(ends_with, """\
        add: "f32[16, 64]" = x + moe_default
        linear_1: "f32[16, 1]" = torch._C._nn.linear(add, head_weight, head_bias)
        squeeze: "f32[16]" = linear_1.squeeze(-1)
        return (squeeze,)""")

    def test_it_fails_loudly_if_it_is_not(self) -> None:
        compiled = mokfx.compile(Model(), options={"mok.on_miss": "raise"})
        compiled(torch.randn(16, 64))


if __name__ == "__main__":
    unittest.main()
