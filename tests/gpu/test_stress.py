"""Thousands of launches with random routings beside other work, and a launch that cannot go on."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from tests.gpu.moe_case import ROUTINGS, Case, error, make, reference
from tests.gpu.test_forward import run

pytestmark = pytest.mark.gpu


def cases(count: int) -> list[Case]:
    made = []
    for _ in range(count):
        experts = random.choice([1, 3, 8, 40, 128])
        made.append(
            make(
                random.choice([1, 7, 64, 333, 1000, 2500]),
                random.choice([64, 256, 832]),
                random.choice([64, 192, 256]),
                experts,
                random.randint(1, min(8, experts)),
                random.choice(ROUTINGS),
                random.choice(["kk", "kn", "nk", "nn"]),
            )
        )
    return made


@pytest.mark.timeout(240)
def test_ten_thousand_launches_beside_other_work() -> None:
    """Each gives the bits of a first one that was compared with float64; two streams, and a third beside."""
    random.seed(torch.initial_seed() % 2**32)
    chosen = cases(40)
    expected = []
    for case in chosen:
        y, truth = run(case), reference(case, torch.float64)
        assert error(y, truth) <= 1.5 * error(reference(case, torch.bfloat16), truth) or not truth.any()
        expected.append(y)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    other = torch.cuda.Stream()
    big = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for i in range(10_000):
        if i % 50 == 0:
            with torch.cuda.stream(other):
                big @ big
        with torch.cuda.stream(streams[i % 2]):
            at = random.randrange(len(chosen))
            wrong[i % 2] += (run(chosen[at]) != expected[at]).any()
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]


def test_an_id_out_of_range_ends_the_launch_with_a_reason() -> None:
    """In a process of its own, since the fault takes the CUDA context with it."""
    program = """
import torch
from tests.gpu.moe_case import make
from tests.gpu.test_forward import run
from mokfx.kernels.faults import fault
case = make(100, 256, 128, 8, 2)
case.ids[17, 1] = 8
try:
    run(case)
    torch.cuda.synchronize()
except RuntimeError:
    print(fault())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "an expert id out of range: 8" in done.stdout, done.stdout + done.stderr
