"""GPUs, and how they reach one another."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import torch

from mokfx.doctor.finding import Finding


def gpus() -> Iterator[Finding]:
    """Each GPU with its architecture and memory, and the driver."""
    if not torch.cuda.is_available():
        yield _no_gpu()
        return
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    yield Finding("driver", driver[0] if driver else "unknown: there is no nvidia-smi", "ok" if driver else "note")
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield Finding(
            f"cuda:{i}",
            f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} multiprocessors, "
            f"{p.total_memory / 2**30:.0f} GiB",
        )


def _no_gpu() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("GPUs", "none: the op runs on the CPU, for development and tests", "note")
    if torch.version.cuda is None:
        return Finding(
            "GPUs",
            "there is an NVIDIA driver, and this torch is built for CPUs",
            "missing",
            "install a torch with CUDA",
        )
    remedy = "look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES; the driver may be older than torch's CUDA"
    return Finding("GPUs", f"torch (CUDA {torch.version.cuda}) sees none", "missing", remedy)


def links() -> Iterator[Finding]:
    """Peer access between GPUs, NVLink, and what nvidia-smi says of the topology."""
    count = torch.cuda.device_count()
    if count < 2:
        yield Finding("peers", f"{count} GPU{'s' if count == 0 else ''} here, so there are no links", "note")
        return
    apart = [(i, j) for i in range(count) for j in range(count) if i != j and not _reaches(i, j)]
    if apart:
        pairs = ", ".join(f"{i}->{j}" for i, j in apart[:6]) + (" ..." if len(apart) > 6 else "")
        remedy = "several ranks need peer access: check `nvidia-smi topo -p2p r`, the container's IPC and the IOMMU"
        yield Finding("peer access", f"not between {pairs}", "missing", remedy)
    else:
        yield Finding("peer access", f"each of {count} GPUs reaches each other")
    yield _nvlink()
    yield from _topology(count)


def _reaches(i: int, j: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(i, j))


def _nvlink() -> Finding:
    speeds = re.findall(r"Link \d+: ([\d.]+) GB/s", _said("nvidia-smi", "nvlink", "--status", "-i", "0"))
    if not speeds:
        remedy = "without NVLink the exchange is slow; if the machine has it, see `nvidia-smi nvlink --status`"
        return Finding("NVLink", "none that is active", "note", remedy)
    return Finding("NVLink", f"{len(speeds)} links of {speeds[0]} GB/s at each GPU, as of cuda:0")


def _topology(count: int) -> Iterator[Finding]:
    rows = [line.split() for line in _said("nvidia-smi", "topo", "-m").splitlines() if re.match(r"GPU\d+\s", line)]
    for row in rows[:count]:
        yield Finding(f"to {row[0]}", " ".join(row[1 : count + 1]))


def _said(*command: str) -> str:
    """What a command prints; "" if there is no such command, or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return re.sub(r"\x1b\[[\d;]*m", "", run.stdout) if run.returncode == 0 else ""
