"""Compiling the bare op: nothing salts the compile caches with its sources, as the backend does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._functorch.config
import torch._inductor.config


@contextmanager
def no_graph_caches() -> Iterator[None]:
    """Compile graphs anew; machine code is still cached by its content."""
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()
