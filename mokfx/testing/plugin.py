"""The pytest fixture `assert_rewritten`: `pytest_plugins = ["mokfx.testing.plugin"]` in conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch._dynamo

from mokfx.report import Report
from mokfx.testing.rewritten import assert_rewritten


@pytest.fixture(name="assert_rewritten")
def _assert_rewritten() -> Iterator[Callable[..., Report]]:
    """`mokfx.testing.assert_rewritten`, in a test that begins and ends with nothing compiled.

    Tests of models share one Dynamo, whose limits and guesses at varying sizes would go from one to the next.
    """
    torch._dynamo.reset()
    yield assert_rewritten
    torch._dynamo.reset()
