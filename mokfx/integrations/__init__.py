"""What models of other packages need before they are captured. Each part acts only where its package is imported."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

PARTS = ("transformers",)
"""Packages, and the modules here that know them."""


def prepare(model: Any) -> None:
    """Make a model ready to be captured whole, as far as its package offers a way; what it computes stays.

    Args:
        model: what is given to `mokfx.compile`.
    """
    for package in PARTS:
        if package in sys.modules:
            import_module(f"{__name__}.{package}").prepare(model)
