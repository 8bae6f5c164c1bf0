"""The kernels compile without a GPU, spill nothing, and the host packs what they read."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from mokfx.kernels import build, driver, forward

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

PTXAS = """
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 1.000 ms
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOKFX_CACHE_DIR", str(tmp_path))
    return tmp_path


def header(name: str) -> int:
    """An integer constant of layout.cuh."""
    found = re.search(rf"constexpr int {name} = (\d+);", (build.SOURCE / "layout.cuh").read_text())
    assert found, name
    return int(found.group(1))


def test_usage_is_read_from_what_ptxas_says() -> None:
    assert build.parse_usage(PTXAS) == (
        build.Usage("one", 32, 0, 0, 0, 0),
        build.Usage("two", 168, 1024, 16, 8, 12),
    )


def declared(name: str) -> list[str]:
    """The kernels of a source file."""
    return sorted(re.findall(r"\b(mok_\w+)(?:, |\(const)", (build.SOURCE / f"{name}.cu").read_text()))


def check(made: build.Build, kernels: Sequence[str]) -> None:
    """The kernels are there, spill nothing, and fit as many threads as they are launched with."""
    by_name = {usage.kernel: usage for usage in made.usage}
    assert made.cubin.read_bytes()[:4] == b"\x7fELF"
    assert sorted(by_name) == declared(made.name) != []
    for kernel in kernels:
        usage = by_name[kernel]
        assert (usage.stack, usage.spilled) == (0, 0), usage
        assert usage.registers * driver.THREADS <= 65536, usage


@needs_nvcc
@pytest.mark.timeout(500)
def test_every_kernel_compiles_for_hopper_without_spills(cache: Path) -> None:
    builds = build.build_all()
    assert [made.name for made in builds] == list(build.names())
    for made in builds:
        check(made, declared(made.name))
        assert all(f"\n{kernel} " in build.table(builds) for kernel in declared(made.name))
    times = [made.cubin.stat().st_mtime_ns for made in builds]
    assert build.build_all() == builds
    assert [made.cubin.stat().st_mtime_ns for made in builds] == times, "a second build must come from the cache"


@needs_nvcc
@pytest.mark.timeout(500)
def test_kernels_with_timestamps_spill_nothing_either(cache: Path) -> None:
    # A timeline is of one rank's inference; the entries for tests and training may pay for their timestamps.
    check(build.build("forward", options=("MOKFX_TRACE",)), ["mok_forward", "mok_forward_general"])


@needs_nvcc
def test_what_nvcc_refuses_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cache / "source"
    source.mkdir()
    (source / "forward.cu").write_text("int main() { return undeclared; }\n")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(RuntimeError, match="undeclared"):
        build.build("forward")
    assert not list(cache.glob("*/forward.cubin"))


@pytest.mark.parametrize(
    ("name", "arch", "sentence"),
    [
        ("sideways", "sm_90a", "no kernel source is named 'sideways'"),
        ("forward", "sm_80", "cannot be built for 'sm_80'"),
    ],
)
def test_unknown_names_are_told(cache: Path, name: str, arch: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build.build(name, arch)
    assert not list(cache.iterdir())


def test_the_key_follows_sources_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> tuple[str, str, str]:
        return build.source_key("forward"), build.source_key("other"), build.source_key()

    for file in build.SOURCE.glob("*.cuh"):
        shutil.copy(file, tmp_path)
    shutil.copy(build.SOURCE / "forward.cu", tmp_path)
    shutil.copy(build.SOURCE / "forward.cu", tmp_path / "other.cu")
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    first = keys()
    assert keys() == first and len(set(first)) == 3
    assert build.source_key("forward", options=("MOKFX_TRACE",)) != first[0]
    (tmp_path / "other.cu").write_text("// another\n")
    second = keys()
    assert second[0] == first[0] and second[1] != first[1] and second[2] != first[2]
    (tmp_path / "ptx.cuh").write_text("// another\n")
    assert not set(keys()) & set(second), "every source may include every header"


def test_without_nvcc_there_is_a_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(cache))
    monkeypatch.delenv("CUDACXX", raising=False)
    assert "no nvcc was found" in (build.unavailable() or "")
    with pytest.raises(RuntimeError, match=r"CUDA toolkit 12\.8 or newer"):
        build.build("forward")


def test_host_and_kernel_agree() -> None:
    text = (build.SOURCE / "layout.cuh").read_text()
    assert f"sizeof(Params) == {ctypes.sizeof(driver.Params)}" in text  # nvcc asserts it of the kernel's
    struct = text[text.index("struct Params {") : text.index("static_assert(sizeof(Params)")]
    declared = re.findall(r"(\w+)(?:\[\w+\])?(?=[,;])", re.sub(r"//.*", "", struct))
    assert declared == [name for name, *_ in driver.Params._fields_]
    assert header("UNIT") == forward.UNIT
    assert header("MAX_EXPERTS") == forward.MAX_EXPERTS
    assert header("TRACE_EVENTS") == forward.TRACE_EVENTS
    assert 128 * (header("CONSUMERS") + 1) == driver.THREADS
