"""Versions, compilers and cache folders."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from mokfx.doctor.finding import Finding
from mokfx.kernels import build

SUPPORTED = ((2, 11), (2, 13))
"""The first and the last minor version of torch that mokfx is tested with."""
OPTIONAL = {
    "cuda-bindings": ("loads the CUDA kernels", 'pip install "mokfx[cuda]"'),
    "jinja2": ("writes the page of `mokfx explain --html`", 'pip install "mokfx[report]"'),
    "expecttest": ("pins texts in your tests (mokfx.testing)", "pip install expecttest"),
}
"""Packages that a part of mokfx needs: what for, and how to get it."""


def software() -> Iterator[Finding]:
    """mokfx, Python, torch and what torch was built for, and optional packages."""
    yield Finding("mokfx", _installed("mokfx") or "not installed as a package; imported from its folder")
    yield Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    first, last = SUPPORTED
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    supported = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    if first <= version <= last:
        yield Finding("torch", torch.__version__)
    else:
        remedy = f'pip install "torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"'
        yield Finding("torch", f"{torch.__version__}; mokfx is for {supported}", "missing", remedy)
    yield _cuda_of_torch()
    for package, (what, remedy) in OPTIONAL.items():
        found = _installed(package)
        yield Finding(package, found or f"not installed; it {what}", "ok" if found else "note", "" if found else remedy)


def _cuda_of_torch() -> Finding:
    if torch.version.cuda is None:
        return Finding(
            "CUDA of torch", "none: this torch is built for CPUs", "note", "install a torch with CUDA for GPUs"
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return Finding("CUDA of torch", f"{torch.version.cuda}; NCCL {nccl}")


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def compilers() -> Iterator[Finding]:
    """What Inductor compiles with, and nvcc for the kernels."""
    yield _host_compiler()
    if torch.cuda.is_available():
        yield _triton()
    yield from _nvcc()


def _host_compiler() -> Finding:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        command = get_cpp_compiler()
    except InvalidCxxCompiler:
        remedy = (
            'install g++ or clang++, or set CXX; without one, options={"mok.compiler": "aot_eager"} runs uncompiled'
        )
        return Finding("C++ (Inductor)", "none found", "missing", remedy)
    return Finding("C++ (Inductor)", _first_line(command, "--version"))


def _triton() -> Finding:
    found = _installed("triton") or _installed("pytorch-triton")
    if found:
        return Finding("Triton (Inductor)", found)
    return Finding("Triton (Inductor)", "not installed; Inductor needs it on GPUs", "missing", "pip install triton")


def _nvcc() -> Iterator[Finding]:
    needed = torch.cuda.is_available()
    try:
        nvcc = build.find_nvcc()
    except RuntimeError as error:
        yield Finding("nvcc", "none found", "missing" if needed else "note", str(error))
    else:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
        release = re.search(r"release (\d+)\.(\d+)", said)
        version = (int(release[1]), int(release[2])) if release else (0, 0)
        if version >= (12, 8):
            yield Finding("nvcc", f"{version[0]}.{version[1]} ({nvcc})")
        else:
            remedy = "install the CUDA toolkit 12.8 or newer, and name it by CUDACXX or CUDA_HOME"
            yield Finding("nvcc", f"{nvcc} is of release {version[0]}.{version[1]}", "missing", remedy)
    why = build.unavailable()
    yield Finding("kernels", why or "compiled, or compiled at first use (mokfx kernels build)", "note" if why else "ok")


def _first_line(*command: str) -> str:
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
    return said[0] if said else command[0]


def caches() -> Iterator[Finding]:
    """The folders that compiled code is kept in."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folders = {
        "kernels": (build.cache_folder(), "MOKFX_CACHE_DIR"),
        "Inductor": (Path(cache_dir()), "TORCHINDUCTOR_CACHE_DIR"),
    }
    for name, (folder, variable) in folders.items():
        if _writable(folder):
            yield Finding(name, f"{folder} ({_size(folder)})")
        else:
            remedy = f"make it writable, or set {variable} to a folder that is"
            yield Finding(name, f"{folder} cannot be written to", "missing", remedy)
    if not torch._inductor.config.fx_graph_cache:
        remedy = "unset TORCHINDUCTOR_FX_GRAPH_CACHE: mokfx salts the key, so that nothing stale is served"
        yield Finding("graph cache", "switched off: each process compiles anew", "note", remedy)


def _writable(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _size(folder: Path) -> str:
    if not folder.exists():
        return "empty as yet"
    files = total = 0
    for file in folder.rglob("*"):
        if files >= 20000:
            return f"over {files} files"
        if file.is_file():
            files, total = files + 1, total + file.stat().st_size
    return f"{files} files, {total / 2**20:.1f} MiB"
