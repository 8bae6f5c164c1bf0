"""One thread for each test process: pytest-xdist has one for each core, and sums then have one order."""

from __future__ import annotations

import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of compilers for each test process

import torch

torch.set_num_threads(1)
