"""What a long command is doing, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator


def progress(command: str, shown: bool = True) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """A function to say what is done inside a `with`: "mokfx check: eager ... 1.2 s".

    Args:
        shown: False for ranks other than the first, which are silent.
    """

    @contextlib.contextmanager
    def doing(what: str) -> Iterator[None]:
        begin = time.perf_counter()
        if shown:
            print(f"mokfx {command}: {what} ...", end="", file=sys.stderr, flush=True)
        ended = "failed"
        try:
            yield
            ended = f"{time.perf_counter() - begin:.1f} s"
        finally:
            if shown:
                print(f" {ended}", file=sys.stderr, flush=True)

    return doing
