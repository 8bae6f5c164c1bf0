"""One thread for each test process: pytest-xdist has one for each core, and sums then have one order."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
