"""The reports of a few models, each made once for all tests of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

import mokfx
from mokfx import Report

from . import models

Reports = Callable[[str], Report]


@pytest.fixture(scope="session")
def report_of() -> Iterator[Reports]:
    """The report of a factory of `models`, by its name."""

    @cache
    def made(name: str) -> Report:
        torch.manual_seed(0)
        model, args = getattr(models, name)()
        try:
            return mokfx.explain(mokfx.compile(model), *args)
        finally:
            models.leave_group()

    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()
