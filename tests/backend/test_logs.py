"""TORCH_LOGS and TORCH_TRACE, which torch reads when it is imported: in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import torch
from tests.backend.models import MoE, tokens
torch.compile(MoE(), backend="mok", fullgraph=True, options={"mok.compiler": "aot_eager"})(tokens())
"""


def run(**environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stderr


def test_torch_logs_and_trace(tmp_path: Path) -> None:
    logged = run(TORCH_LOGS="+mokfx", TORCH_TRACE=str(tmp_path))
    assert "mokfx: 1 MoE layer became mok.moe" in logged
    assert "before:" in logged
    assert "torch.ops.mok.moe" in logged

    (trace,) = tmp_path.iterdir()
    records = [line.partition("] ")[2] for line in trace.read_text().splitlines()]
    artifacts = [json.loads(record).get("artifact", {}).get("name") for record in records if record.startswith("{")]
    for name in ("mok_before_rewrite", "mok_after_rewrite", "mok_match_report"):
        assert artifacts.count(name) == 1, name
    assert trace.read_text().count("mokfx: 1 MoE layer became mok.moe") == 1


def test_nothing_is_said_unasked() -> None:
    assert "mokfx" not in run()
