"""What a command has imported from a user's folder does not stay for the next test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KEPT = (ROOT / "mokfx", *(Path(folder) for folder in sys.path if folder.endswith("site-packages")), Path(sys.prefix))


@pytest.fixture(autouse=True)
def forget_users_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None)
        users = file is not None and not any(Path(file).is_relative_to(kept) for kept in KEPT)
        if users and not name.startswith("tests."):
            del sys.modules[name]
