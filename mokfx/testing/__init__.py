"""For tests of your own project: that its MoE layers are rewritten, and into what.

    from mokfx.testing import assert_rewritten

    def test_my_moe():
        assert_rewritten(MyModel(), torch.randn(16, 64), expected=\"\"\"...\"\"\")

With EXPECTTEST_ACCEPT=1 a text in triple quotes is written by the test itself. As a pytest fixture, which also starts
each test with an empty Dynamo: `pytest_plugins = ["mokfx.testing.plugin"]` in conftest.py.
"""

from mokfx.testing.facts import Fact, facts_of
from mokfx.testing.normalise import normalised
from mokfx.testing.rewritten import assert_rewritten

__all__ = ["Fact", "assert_rewritten", "facts_of", "normalised"]
