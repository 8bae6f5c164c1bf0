"""The house rules that a tool can check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("command", [("ruff", "check", "."), ("mypy",)], ids=lambda command: command[0])
def test_clean(command: tuple[str, ...]) -> None:
    process = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
