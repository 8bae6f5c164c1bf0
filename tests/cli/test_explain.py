"""`mokfx explain`, as a newcomer types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mokfx.cli import main

MODELS = Path(__file__).parent.parent / "page" / "models.py"

BROKEN = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x @ torch.ones(5, 3)

def wrong_shape(): return Model(), (torch.ones(2, 4),)
def wrong_call(): return Model(), ()
"""


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def test_the_report_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{MODELS}:misses_only"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("mokfx: no MoE layer was rewritten, 1 left alone (1 graph; ")
    assert "left alone:\n  models.py:" in said.out
    assert said.err.startswith("mokfx explain: tracing the model ... ")


def test_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["explain", f"{MODELS}:misses_only", "--html", str(path), "--card", "H100"]) == 0
    assert capsys.readouterr().out.endswith(f"\nwritten to {path}\n")
    text = path.read_text(encoding="utf-8")
    assert f"<title>{MODELS}:misses_only &middot; mokfx explain</title>" in text
    assert "understanding ended here" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{MODELS}:match_and_misses", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [match["top_k"] for match in said["matches"]] == ["2"]
    assert [sorted(miss) for miss in said["misses"]] == 2 * [["code", "node", "reason", "where"]]
    assert said["graphs"][0]["nodes_after"] < said["graphs"][0]["nodes_before"]


def test_a_model_is_explained_as_its_factory_compiled_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without mokfx.compile, sizes that depend on data break the graph."""
    (tmp_path / "plain.py").write_text(
        f"import sys\nsys.path.insert(0, {str(MODELS.parent.parent.parent)!r})\n"
        "import torch\nfrom tests.page.models import Loop\n"
        "def make(): return torch.compile(Loop(8, 12, 4, 2), backend='mok'), (torch.randn(6, 8),)\n"
    )
    assert main(["explain", f"{tmp_path / 'plain.py'}:make"]) == 0
    assert "1 left alone (2 graphs, 1 graph break; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("wrong_shape", "raised TorchRuntimeError: RuntimeError('a and b must have same reduction dim"),
        ("wrong_shape", "(at broken.py:6 `return x @ torch.ones(5, 3)`)"),
        ("wrong_call", "raised TypeError: Model.forward() missing 1 required positional argument: 'x'"),
        ("absent", "has no 'absent'; its functions: wrong_shape, wrong_call"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factory: str, says: str
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    assert main(["explain", f"{tmp_path / 'broken.py'}:{factory}"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err.splitlines()[-1]
    assert "Traceback" not in said.err


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{MODELS}:dense", "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written to" in capsys.readouterr().err


def test_without_jinja_nothing_is_traced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["explain", f"{MODELS}:dense", "--html", "page.html"]) == 2
    assert capsys.readouterr().err == (
        'mokfx: the report page needs Jinja2, which is not installed: pip install "mokfx[report]"\n'
    )


def test_ranks_explain_together_and_the_first_writes(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    (tmp_path / "parallel.py").write_text(
        f"import sys\nsys.path.insert(0, {str(MODELS.parent.parent.parent)!r})\n"
        "import torch\nimport torch.distributed as dist\nfrom tests.page.models import ExpertParallel\n"
        "def make():\n"
        "    layer = ExpertParallel(32, 16, 8, 2, dist.group.WORLD).bfloat16()\n"
        "    return layer, (torch.randn(2, 8, 32, dtype=torch.bfloat16),)\n"
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mokfx.cli", "explain"]
    done = subprocess.run(
        [sys.executable, *command, f"{tmp_path / 'parallel.py'}:make", "--html", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    assert "2 ranks of group" in path.read_text(encoding="utf-8")
