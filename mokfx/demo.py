"""`mokfx demo`: one rank in this process, then several in processes of their own."""

from __future__ import annotations

import sys
import time

from mokfx.demo_ranks import run_ranks
from mokfx.demo_steps import DemoError, demonstrate

RULE = "=" * 96


def run(ranks: int = 2, steps: int = 20, seed: int = 0) -> int:
    """Print the demo; returns the exit code: 0, or 1 if compiled and eager were found to differ.

    Args:
        ranks: of the second part, which is left out for 1.
        steps: of training.
        seed: of weights and data.
    """
    start = time.monotonic()
    try:
        _headline("One rank: a transformer block with an MoE layer, torch.compile(model, backend='mok')")
        demonstrate(steps, seed)
        if ranks > 1:
            _headline(f"{ranks} ranks: the same block, its experts divided among them (this is rank 0)")
            sys.stdout.flush()
            run_ranks(ranks, steps, seed)
    except DemoError as error:
        print(f"\nmokfx demo failed: {error}", file=sys.stderr)
        return 1
    print(f"\nAll equal to eager, in {time.monotonic() - start:.0f} s.")
    return 0


def _headline(text: str) -> None:
    print(f"\n{RULE}\n{text}\n{RULE}\n")
