"""Compiles the CUDA kernels with nvcc into cubins, kept in a user cache, and reports what each kernel takes.

Each source file `kernels/NAME.cu` becomes one cubin. Needs nvcc 12.8 or newer and no GPU. The cache key is the
hash of the file, the headers, the architecture and the options, so an edited kernel is compiled anew and a
compiled one is found again by every process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger("mokfx.kernels")

SOURCE = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-lineinfo", "-Xptxas", "-v")
ARCHITECTURES = ("sm_90a",)
"""What the kernels are written for: wgmma and setmaxnreg are sm_90a's own."""


@dataclass(frozen=True)
class Usage:
    """What ptxas says that one kernel takes; sizes in bytes, per thread except shared memory."""

    kernel: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def spilled(self) -> int:
        """Bytes of registers moved to memory and back."""
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True)
class Build:
    """One compiled source file."""

    name: str
    cubin: Path
    arch: str
    options: tuple[str, ...]
    usage: tuple[Usage, ...]
    key: str


def table(builds: Iterable[Build]) -> str:
    """A line a kernel: registers a thread, bytes of static shared memory, of stack, and spilled."""
    rows = [f"{'kernel':<28}{'registers':>10}{'shared':>8}{'stack':>7}{'spilled':>9}"]
    rows += [
        f"{u.kernel:<28}{u.registers:>10}{u.shared:>8}{u.stack:>7}{u.spilled:>9}" for b in builds for u in b.usage
    ]
    return "\n".join(rows)


def names() -> tuple[str, ...]:
    """The source files, without .cu."""
    return tuple(sorted(file.stem for file in SOURCE.glob("*.cu")))


def cache_folder() -> Path:
    """Where cubins are kept: $MOKFX_CACHE_DIR, or mokfx/kernels under the user's cache folder."""
    if folder := os.environ.get("MOKFX_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mokfx" / "kernels"


def source_key(name: str = "*", arch: str = "sm_90a", options: Sequence[str] = ()) -> str:
    """The cache key: a hash of the source `name` (of all for "*"), the headers, the architecture and the options."""
    digest = hashlib.sha256(repr((name, arch, tuple(options), FLAGS)).encode())
    for file in sorted([*SOURCE.glob(f"{name}.cu"), *SOURCE.glob("*.cuh")]):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:20]


def find_nvcc() -> str:
    """The nvcc to use: $CUDACXX, on the PATH, or under $CUDA_HOME or /usr/local/cuda.

    Raises RuntimeError if there is none.
    """
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    for name in (os.environ.get("CUDACXX"), "nvcc", str(home / "bin" / "nvcc")):
        if name and (found := shutil.which(name)):
            return found
    raise RuntimeError(
        "no nvcc was found on the PATH, in $CUDA_HOME or in $CUDACXX: install the CUDA toolkit 12.8 or newer"
    )


def unavailable(arch: str = "sm_90a") -> str | None:
    """Why there are no kernels for `arch`, neither compiled nor to compile, or None."""
    if all((cache_folder() / source_key(name, arch) / "usage.json").exists() for name in names()):
        return None
    try:
        find_nvcc()
    except RuntimeError as error:
        return str(error)
    return None


def parse_usage(text: str) -> tuple[Usage, ...]:
    """The kernels' usage from the output of `ptxas -v`, by name."""
    number = r"(\d+) bytes"
    found = []
    for part in re.split(r"Compiling entry function ", text)[1:]:
        name = re.match(r"'([^']+)'", part)
        spills = re.search(rf"{number} stack frame, {number} spill stores, {number} spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(rf"{number} smem", part)
        if name and spills and registers:
            stack, stores, loads = map(int, spills.groups())
            size = int(shared.group(1)) if shared else 0
            found.append(Usage(name.group(1), int(registers.group(1)), size, stack, stores, loads))
    return tuple(sorted(found, key=lambda usage: usage.kernel))


def build(name: str, arch: str = "sm_90a", options: Sequence[str] = (), *, force: bool = False) -> Build:
    """Compiles `kernels/NAME.cu` for `arch`, or finds it in the cache.

    `options` are macros to define, such as "MOKFX_TRACE". Raises ValueError for an unknown name or architecture,
    and RuntimeError with nvcc's words if it fails, or if ptxas says that it had to serialize the tensor core
    instructions.
    """
    if name not in names():
        raise ValueError(f"no kernel source is named {name!r}; there are {', '.join(names())}")
    if arch not in ARCHITECTURES:
        raise ValueError(f"the kernels cannot be built for {arch!r}; they are written for {', '.join(ARCHITECTURES)}")
    key = source_key(name, arch, options)
    folder = cache_folder() / key
    cubin, record = folder / f"{name}.cubin", folder / "usage.json"
    if force or not (cubin.exists() and record.exists()):
        _compile(name, arch, options, folder)
    usage = tuple(Usage(**entry) for entry in json.loads(record.read_text()))
    return Build(name, cubin, arch, tuple(options), usage, key)


def build_all(arch: str = "sm_90a", options: Sequence[str] = (), *, force: bool = False) -> tuple[Build, ...]:
    """`build` of every source file, side by side."""
    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(lambda name: build(name, arch, options, force=force), names()))


def _compile(name: str, arch: str, options: Sequence[str], folder: Path) -> None:
    nvcc = find_nvcc()
    folder.parent.mkdir(parents=True, exist_ok=True)
    log.warning("mokfx: compiling kernels/%s.cu for %s into %s (tens of seconds, once)", name, arch, folder)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder.parent) as directory:  # renamed, so that nobody sees half a build
        scratch = Path(directory)
        target = arch.removeprefix("sm_")
        command = [nvcc, f"-gencode=arch=compute_{target},code=sm_{target}", "-cubin", *FLAGS]
        command += [f"-D{option}" for option in options]
        command += ["-o", str(scratch / f"{name}.cubin"), str(SOURCE / f"{name}.cu")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        said = run.stdout + run.stderr
        if run.returncode != 0:
            raise RuntimeError(
                f"nvcc could not compile kernels/{name}.cu for {arch} (needs nvcc 12.8 or newer). It said:\n{said}"
            )
        if "serialized" in said:
            raise RuntimeError(
                f"ptxas serialized the tensor core instructions of kernels/{name}.cu for {arch}: slow. It said:\n{said}"
            )
        (scratch / "usage.json").write_text(json.dumps([asdict(usage) for usage in parse_usage(said)]))
        folder.mkdir(exist_ok=True)
        for file in (f"{name}.cubin", "usage.json"):
            os.replace(scratch / file, folder / file)
    log.info("mokfx: compiled kernels/%s.cu in %.1f s", name, time.perf_counter() - start)
