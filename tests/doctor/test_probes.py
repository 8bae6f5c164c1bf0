"""What the doctor says of machines that lack something: each such line has a remedy."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

import mokfx.ops
from mokfx.doctor import Finding, examine, gpus, providers, ranks, software
from mokfx.doctor.symmetric import Told

from ..ranks import run_ranks


def named(findings: Iterator[Finding] | list[Finding], name: str) -> Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    return found


def test_here_nothing_fails_and_what_is_missing_has_a_remedy() -> None:
    findings = examine()
    assert {finding.part for finding in findings} == set(PARTS)
    assert [finding for finding in findings if finding.state == "failed"] == []
    assert all(finding.remedy for finding in findings if finding.state == "missing")
    assert named(findings, "torch").value == torch.__version__


PARTS = ("software", "compilers", "caches", "GPUs", "links", "ranks", "the op")


def test_on_two_ranks_it_says_how_they_exchange() -> None:
    for findings in run_ranks(2, _examined):
        assert named(findings, "ranks").value == "2, of backend gloo"
        assert named(findings, "symmetric memory").value == "none without GPUs; ranks exchange by gloo"
        assert named(findings, "inference, 2 ranks").value.startswith("runs by reference")


def _examined(rank: int) -> list[Finding]:
    return examine()


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    found = named(software.software(), "torch")
    assert found.state == "missing" and found.value == "2.9.1+cu128; mokfx is for 2.11 to 2.13"
    assert found.remedy == 'pip install "torch>=2.11,<2.14"'


def test_the_versions_are_those_of_the_package() -> None:
    root = Path(__file__).parent.parent.parent
    (spec,) = re.findall(r'"(torch>=[^"]*)"', (root / "pyproject.toml").read_text())
    first, last = software.SUPPORTED
    assert spec == f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"


def test_no_host_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    found = named(software.compilers(), "C++ (Inductor)")
    assert found.state == "missing" and "aot_eager" in found.remedy


@pytest.mark.parametrize(("has_gpu", "state"), [(False, "note"), (True, "missing")])
def test_no_nvcc_is_missing_where_there_is_a_gpu(
    has_gpu: bool, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MOKFX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    findings = list(software._nvcc())
    assert named(findings, "nvcc").state == state
    assert "install the CUDA toolkit" in named(findings, "nvcc").remedy
    assert named(findings, "kernels").state == "note"


def test_an_old_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.99'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    found = named(software._nvcc(), "nvcc")
    assert found.state == "missing" and found.value.endswith("is of release 12.4") and found.remedy


def test_a_cache_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOKFX_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    found = named(software.caches(), "kernels")
    assert found.state == "missing" and "MOKFX_CACHE_DIR" in found.remedy
    monkeypatch.setenv("MOKFX_CACHE_DIR", str(tmp_path / "new"))
    assert named(software.caches(), "kernels").value == f"{tmp_path / 'new'} (empty as yet)"


def test_a_cache_that_is_off() -> None:
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert named(software.caches(), "graph cache").remedy


SMI = {
    "--query-gpu=driver_version": "580.159\n580.159\n",
    "nvlink": "GPU 0: NVIDIA H200\n" + "".join(f"\t Link {i}: 26.562 GB/s\n" for i in range(18)),
    "topo": "\x1b[4m\tGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n\nLegend:\n",
}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: card)
    monkeypatch.setattr(gpus, "_reaches", lambda i, j: True)
    monkeypatch.setattr(gpus.shutil, "which", lambda name: name)

    def smi(command: tuple[str, ...], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, SMI[command[1]], "")

    monkeypatch.setattr(gpus.subprocess, "run", smi)


@pytest.mark.usefixtures("two_gpus")
def test_two_gpus() -> None:
    assert [f"{f.name}: {f.value}" for f in (*gpus.gpus(), *gpus.links())] == [
        "driver: 580.159",
        "cuda:0: NVIDIA H200, sm_90, 132 multiprocessors, 140 GiB",
        "cuda:1: NVIDIA H200, sm_90, 132 multiprocessors, 140 GiB",
        "peer access: each of 2 GPUs reaches each other",
        "NVLink: 18 links of 26.562 GB/s at each GPU, as of cuda:0",
        "to GPU0: X NV18",
        "to GPU1: NV18 X",
    ]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_reaches", lambda i, j: i < j)
    found = named(gpus.links(), "peer access")
    assert (found.state, found.value) == ("missing", "not between 1->0") and found.remedy


def test_a_driver_and_no_gpu_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, says in ((None, "this torch is built for CPUs"), ("13.0", "torch (CUDA 13.0) sees none")):
        monkeypatch.setattr(torch.version, "cuda", version)
        found = named(gpus.gpus(), "GPUs")
        assert found.state == "missing" and says in found.value and found.remedy


def said(good: bool, text: str) -> list[Told]:
    return [(True, "reads"), (good, text)]


def test_ranks_are_well_or_each_that_is_not_says_so() -> None:
    assert list(ranks._findings(said(True, "reads too"))) == [Finding("symmetric memory", "reads")]
    (bad,) = ranks._findings(said(False, "RuntimeError: no peer"))
    assert (bad.state, bad.value) == ("missing", "rank 1: RuntimeError: no peer") and bad.remedy


def test_processes_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess("", 1, "", "Traceback\nRuntimeError: CUDA is out\n")
    monkeypatch.setattr(ranks.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (bad,) = (finding for finding in ranks.ranks() if finding.state != "ok")
    assert bad.value == "rank 0: RuntimeError: CUDA is out" and bad.remedy


def test_no_provider_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(call: Any, requested: str | None = None) -> str:
        return f"provider {requested!r} cannot run this call: it is Tuesday"

    monkeypatch.setattr(providers, "unsupported_reason", why)
    findings = list(providers.providers())
    missing = [finding for finding in findings if finding.state == "missing"]
    assert [finding.name for finding in missing] == ["inference on cpu, bf16", "training on cpu, bf16"]
    assert all("mok.provider" in finding.remedy for finding in missing)
    assert {finding.value for finding in findings if finding.state == "note"} == {"it is Tuesday"}


def test_a_provider_that_is_set() -> None:
    with mokfx.ops.use_provider("reference"):
        assert named(providers.providers(), "mok.provider").value == "'reference' is set for the whole process"
