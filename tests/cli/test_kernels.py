"""`mokfx kernels build`: a table, exit codes, and a sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from mokfx.cli import main
from mokfx.kernels import build


def builds(spilled: int) -> tuple[build.Build, ...]:
    usage = build.Usage("mok_forward_kk", 168, 0, 0, spilled, 0)
    return (build.Build("forward", Path("somewhere/forward.cubin"), "sm_90a", (), (usage,), "key"),)


@pytest.mark.parametrize("spilled", [0, 8])
def test_the_table_and_the_exit_code(
    spilled: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, bool]] = []

    def build_all(arch: str, *, force: bool) -> tuple[build.Build, ...]:
        asked.append((arch, force))
        return builds(spilled)

    monkeypatch.setattr("mokfx.cli.kernels.build_all", build_all)
    assert main(["kernels", "build", "--force"]) == (1 if spilled else 0)
    assert asked == [("sm_90a", True)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "somewhere/forward.cubin"
    assert lines[1].split() == ["kernel", "registers", "shared", "stack", "spilled"]
    assert lines[2].split() == ["mok_forward_kk", "168", "0", "0", str(spilled)]


def test_an_unknown_architecture_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "build", "--arch", "sm_80"]) == 2
    assert capsys.readouterr().err == (
        "mokfx: the kernels cannot be built for 'sm_80'; they are written for sm_90a\n"
    )


def test_without_nvcc_what_to_do_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOKFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    assert main(["kernels", "build"]) == 2
    assert "install the CUDA toolkit 12.8 or newer" in capsys.readouterr().err
