"""The demo on several ranks: one process each, joined by gloo over the loopback interface and a file.

`python -m mokfx.demo_ranks` is one of these processes.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from mokfx.demo_steps import DemoError, demonstrate

LOOPBACK = ("lo", "lo0")
MODULE = "mokfx.demo_ranks"
FOUND_WRONG = 3
"""Exit code of a rank that found what `DemoError` says; another code is that of a crash."""


def run_ranks(ranks: int, steps: int, seed: int, timeout: float = 300.0) -> None:
    """Run the demo on `ranks` ranks; print rank 0's output, then one line for each other rank.

    Raises:
        DemoError: a rank failed or did not finish in `timeout` seconds; the message quotes its output.
    """
    with tempfile.TemporaryDirectory(prefix="mokfx-demo-") as folder:
        outputs = [Path(folder, f"{rank}.txt") for rank in range(ranks)]
        processes = [_start(rank, ranks, steps, seed, folder, output) for rank, output in enumerate(outputs)]
        try:
            codes = _wait(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed := [rank for rank, code in enumerate(codes) if code]:
            # A rank that only lost its peer has nothing to tell.
            rank = next((rank for rank in failed if codes[rank] == FOUND_WRONG), failed[0])
            raise DemoError(f"on rank {rank} of {ranks}:\n{outputs[rank].read_text()}")
        if unfinished := [rank for rank, code in enumerate(codes) if code is None]:
            raise DemoError(f"rank {unfinished[0]} of {ranks} did not finish in {timeout:.0f} s")
        print(outputs[0].read_text(), end="")
        for rank in range(1, ranks):
            print(f"  rank {rank}: the same checks passed on its own tokens and experts")


def _start(
    rank: int, ranks: int, steps: int, seed: int, folder: str, output: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", MODULE, folder]
    numbers = {"--rank": rank, "--ranks": ranks, "--steps": steps, "--seed": seed}
    with output.open("wb") as stream:
        return subprocess.Popen(
            command + [str(part) for option in numbers.items() for part in option],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_loopback(), "OMP_NUM_THREADS": "1"},
        )


def _loopback() -> dict[str, str]:
    """Gloo looks the host's name up by default, which needs a network that knows it."""
    names = [name for _, name in socket.if_nameindex() if name in LOOPBACK]
    return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", names[0])} if names else {}


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """The exit codes, as soon as all have ended or one has failed; None for a process that still runs."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            break
        time.sleep(0.05)
    return [process.poll() for process in processes]


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    for name in ("--rank", "--ranks", "--steps", "--seed"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store = FileStore(str(Path(arguments.folder, "store")), arguments.ranks)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=arguments.rank,
        world_size=arguments.ranks,
        timeout=timedelta(seconds=120),
    )
    try:
        demonstrate(arguments.steps, arguments.seed, dist.group.WORLD)
    except DemoError as error:
        print(f"\n{error}", flush=True)
        os._exit(FOUND_WRONG)  # at once: the peers wait for this rank in a collective
    dist.barrier()  # who leaves early would break a slower rank's last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
