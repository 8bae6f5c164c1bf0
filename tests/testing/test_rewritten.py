"""`assert_rewritten` in a user's tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mokfx
from mokfx.report import Report
from mokfx.testing import normalised

from ..check.models import layer, tokens

Assert = Callable[..., Report]


def test_it_passes_where_all_is_rewritten(assert_rewritten: Assert) -> None:
    for model in (layer(), mokfx.compile(layer())):
        report = assert_rewritten(model, tokens())
        assert len(report.matches) == 1
        assert_rewritten(model, tokens(), expected=1)
        assert_rewritten(model, tokens(), expected=normalised(report))


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (None, "expected at least 1 MoE layer to be rewritten and none left alone, found 0:"),
        (1, "expected 1 MoE layer to be rewritten and none left alone, found 0:"),
        (2, "expected 2 MoE layers to be rewritten and none left alone, found 0:"),
    ],
)
def test_it_fails_where_there_is_none(expected: int | None, says: str, assert_rewritten: Assert) -> None:
    with pytest.raises(AssertionError) as failed:
        assert_rewritten(nn.Linear(4, 4), torch.ones(2, 4), expected=expected)
    assert str(failed.value).startswith(says)
    assert "mokfx: no MoE layer was rewritten" in str(failed.value)


def test_it_fails_where_one_is_left_alone_also_if_the_number_is_right(assert_rewritten: Assert) -> None:
    left = torch.compile(layer(), backend="mok")  # which breaks the graph, unlike mokfx.compile

    def both(x: Tensor) -> Tensor:
        return left._orig_mod(x)

    with pytest.raises(AssertionError, match="found 0 and 1 left alone") as failed:
        assert_rewritten(torch.compile(both, backend="mok"), tokens(), expected=0)
    assert "the graph broke here" in str(failed.value)


def test_zero_can_be_expected(assert_rewritten: Assert) -> None:
    assert_rewritten(nn.Linear(4, 4), torch.ones(2, 4), expected=0)


TEST = '''
import torch
from tests.check.models import layer, tokens

def test_layer(assert_rewritten):
    assert_rewritten(
        layer(), tokens(),
        expected="""anything""",
    )
'''


RUN = """
import os, sys, pytest
arguments = ["-q", "-p", "mokfx.testing.plugin", "-p", "no:cacheprovider", "--rootdir", sys.argv[1]]
os.environ["EXPECTTEST_ACCEPT"] = "1"
assert pytest.main([*arguments, f"{sys.argv[1]}/test_user.py"]) == 0
del os.environ["EXPECTTEST_ACCEPT"]
written = open(f"{sys.argv[1]}/test_user.py").read()
for name, text in (("right", written), ("wrong", written.replace("swiglu", "geglu"))):
    open(f"{sys.argv[1]}/test_{name}.py", "w").write(text)
    print(name, int(pytest.main([*arguments, f"{sys.argv[1]}/test_{name}.py"])))
"""


def test_expecttest_writes_the_text(tmp_path: Path) -> None:
    """As a user has it: with the plugin, first to accept, then to check."""
    (tmp_path / "test_user.py").write_text(TEST)
    process = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    written = (tmp_path / "test_user.py").read_text()
    assert "became mok.moe (1 graph)" in written and "anything" not in written
    assert written.startswith(TEST[: TEST.index('"""')])
    assert "\nright 0\n" in process.stdout and "\nwrong 1\n" in process.stdout
    assert "-  experts   geglu" in process.stdout and "+  experts   swiglu" in process.stdout
