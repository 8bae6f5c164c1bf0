from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Each test compiles the same few code objects anew: without this they meet Dynamo's recompile limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_grad_enabled(True)  # a raw graph that raises between its own no_grad nodes leaves gradients off
