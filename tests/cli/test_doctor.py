"""`mokfx doctor`: its text, its JSON, its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from expecttest import assert_expected_inline

import mokfx.doctor
from mokfx.cli import main
from mokfx.cli.doctor import _lines
from mokfx.doctor import Finding


def well() -> Iterator[Finding]:
    yield Finding("torch", "2.13.0")
    yield Finding(
        "a package", "not installed; it does something that takes many words to say", "note", "pip install it"
    )


def ill() -> Iterator[Finding]:
    yield Finding("nvcc", "none found", "missing", "install the CUDA toolkit, which is a long way to go for some words")
    raise OSError("the device is gone")


@pytest.mark.parametrize(("probes", "code"), [({"software": well}, 0), ({"software": well, "compilers": ill}, 1)])
def test_json_and_exit_code(
    probes: dict[str, object], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mokfx.doctor, "PROBES", probes)
    assert main(["doctor", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is (code == 0)
    (findings,) = said["ranks"]
    assert findings[0] == {"name": "torch", "value": "2.13.0", "state": "ok", "remedy": "", "part": "software"}
    assert ("failed" in {finding["state"] for finding in findings}) is (code == 1)


def test_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr(mokfx.doctor, "PROBES", {"software": well, "compilers": ill})
    assert main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert_expected_inline(printed.out, """\
software
  torch      2.13.0
  a package  not installed; it does something that takes many words to
             say
             -> pip install it
compilers
  nvcc       none found  <--
             -> install the CUDA toolkit, which is a long way to go for
                some words
  probe      OSError: the device is gone  <--
             -> the other lines do not depend on it; if the machine
                works otherwise, report this

2 lines marked <-- with a remedy
""")
    assert printed.err.startswith("mokfx doctor: software ... 0.0 s\nmokfx doctor: compilers ...")


def test_of_other_ranks_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    one = [Finding("torch", "2.13.0", part="software"), Finding("cuda:0", "H200", part="GPUs")]
    other = [one[0], Finding("cuda:0", "A100", part="GPUs")]
    assert_expected_inline("\n".join(_lines([one, list(one), other])), """\
software
  torch   2.13.0
GPUs
  cuda:0  H200

rank 2 differs:
GPUs
  cuda:0  A100

nothing is missing""")


def test_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    text = capsys.readouterr().out
    assert (code == 0) == text.endswith("\nnothing is missing\n")
    assert "\nthe op\n" in text
