"""The kernels compile without a GPU, spill nothing, and the host packs what they read."""

from __future__ import annotations

import ctypes
import re
import shutil
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


@needs_nvcc
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [(), ("MOKFX_TRACE",)], ids=["plain", "traced"])
def test_kernels_compile_for_hopper_without_spills(cache: Path, options: tuple[str, ...]) -> None:
    made = build.build("sm_90a", options)
    names = [f"mok_forward_{kind}{up}{down}" for kind in ("general_", "") for up in "kn" for down in "kn"]
    assert [usage.kernel for usage in made.usage] == names
    for usage in made.usage:
        assert (usage.stack, usage.spill_stores, usage.spill_loads) == (0, 0, 0), usage
        assert usage.registers * driver.THREADS <= 65536, usage
    assert made.cubin.read_bytes()[:4] == b"\x7fELF"
    before = made.cubin.stat().st_mtime_ns
    assert build.build("sm_90a", options) == made
    assert made.cubin.stat().st_mtime_ns == before, "a second build must come from the cache"
    assert "mok_forward_kk" in made.table()


@needs_nvcc
def test_what_nvcc_refuses_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cache / "source"
    source.mkdir()
    (source / "forward.cu").write_text("int main() { return undeclared; }\n")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(RuntimeError, match="undeclared"):
        build.build()
    assert not list(cache.glob("*/forward.cubin"))


def test_the_key_follows_sources_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.source_key()
    assert build.source_key() == first
    assert build.source_key(options=("MOKFX_TRACE",)) != first
    for file in build.SOURCE.glob("*.cu*"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    assert build.source_key() == first
    with (tmp_path / "ptx.cuh").open("a") as changed:
        changed.write("// a comment\n")
    assert build.source_key() != first


def test_without_nvcc_there_is_a_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(cache))
    monkeypatch.delenv("CUDACXX", raising=False)
    assert "no nvcc was found" in (build.unavailable() or "")
    with pytest.raises(RuntimeError, match=r"CUDA toolkit 12\.8 or newer"):
        build.build()


def test_host_and_kernel_agree() -> None:
    text = (build.SOURCE / "layout.cuh").read_text()
    assert f"sizeof(Params) == {ctypes.sizeof(driver.Params)}" in text  # nvcc asserts it of the kernel's
    struct = text[text.index("struct Params {") : text.index("static_assert(sizeof(Params)")]
    declared = re.findall(r"(\w+)(?:\[\d+\])?(?=[,;])", re.sub(r"//.*", "", struct))
    assert declared == [name for name, *_ in driver.Params._fields_]
    assert header("UNIT") == forward.UNIT
    assert header("MAX_EXPERTS") == forward.MAX_EXPERTS
    assert header("TRACE_EVENTS") == forward.TRACE_EVENTS
    assert 128 * (header("CONSUMERS") + 1) == driver.THREADS
