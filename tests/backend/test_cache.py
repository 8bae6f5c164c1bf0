"""Inductor's caches: untouched for a model without MoE, on and never stale for one with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import mokfx
from mokfx.cache import HOOK, Salt, salted

from .models import Expert


class Named(CustomGraphPass):
    """A user's pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ran: list[torch.fx.Graph] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.ran.append(graph)

    def uuid(self) -> Any:
        return self.name


def test_salt_follows_the_user_s_passes() -> None:
    graph = torch.fx.Graph()
    first, second = Named("first"), Named("second")
    for present in ([first, second], (first, second)):
        salt = salted({HOOK: present, "max_autotune": True}, "s")
        assert salt["max_autotune"] is True
        assert salt[HOOK].uuid() == ("first", "second", "s")
        salt[HOOK](graph)
    assert len(first.ran) == len(second.ran) == 2
    assert salted({HOOK: first}, "s")[HOOK].uuid() == ("first", "s")
    assert salted({}, "s")[HOOK].uuid() == ("s",)
    with torch._inductor.config.patch({HOOK: second}):
        assert salted({}, "s")[HOOK].uuid() == ("second", "s")


def test_a_pass_without_a_name_switches_caching_off_as_in_inductor() -> None:
    assert Salt("s", (lambda graph: None,)).uuid() is None


def test_a_model_without_moe_compiles_exactly_as_with_inductor() -> None:
    """In one cache folder, the second of the two backends finds what the first has made."""
    model = Expert()
    x = torch.randn(5, 8)
    with fresh_cache(), torch.no_grad():
        for backend, expected in (("inductor", (0, 1)), ("mok", (1, 0))):
            torch._dynamo.reset()
            counters.clear()
            torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
            found = counters["aot_autograd"]
            assert (found["autograd_cache_hit"], found["autograd_cache_miss"]) == expected


PACKAGE = Path(mokfx.__file__).parent
CHILD = Path(__file__).with_name("cache_child.py")
ORIGINAL, CHANGED = "MOE_BACKWARD(grad_y, *args", "MOE_BACKWARD(2 * grad_y, *args"
"""A line of the op's autograd formula: what AOTAutograd traces, and what torch's caches know nothing of."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two copies of the package, in one of which the op's gradients are twice as large."""
    copies = {}
    for name in ("original", "changed"):
        copies[name] = tmp_path_factory.mktemp(name)
        shutil.copytree(PACKAGE, copies[name] / "mokfx", ignore=shutil.ignore_patterns("__pycache__"))
    formula = copies["changed"] / "mokfx" / "ops" / "autograd.py"
    assert formula.read_text().count(ORIGINAL) == 1
    formula.write_text(formula.read_text().replace(ORIGINAL, CHANGED))
    return copies


def run(source: Path, cache: Path, salt: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(source), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-P", str(CHILD), salt]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    assert result["package"].startswith(str(source))
    assert result["bypasses"] == 0
    return result


def test_an_unchanged_op_hits_and_a_changed_one_is_not_served_stale(sources: dict[str, Path], tmp_path: Path) -> None:
    first = run(sources["original"], tmp_path, "salted")
    assert (first["hits"], first["misses"]) == (0, 1)
    again = run(sources["original"], tmp_path, "salted")
    assert (again["hits"], again["misses"]) == (1, 0)
    assert again["gradient"] == first["gradient"]
    changed = run(sources["changed"], tmp_path, "salted")
    assert (changed["hits"], changed["misses"]) == (0, 1)
    assert changed["gradient"] == 2 * first["gradient"]


def test_without_the_salt_it_would_be(sources: dict[str, Path], tmp_path: Path) -> None:
    """That the test above can see a stale gradient."""
    first = run(sources["original"], tmp_path, "unsalted")
    changed = run(sources["changed"], tmp_path, "unsalted")
    assert changed["hits"] == 1
    assert changed["gradient"] == first["gradient"]
