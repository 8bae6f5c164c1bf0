"""`python -m mokfx.kernels`: compiles the kernels ahead of time, without a GPU; prints what each takes."""

from __future__ import annotations

import argparse
import sys

from .build import build


def main() -> int:
    """Returns 1 if a kernel spills registers."""
    parser = argparse.ArgumentParser(prog="python -m mokfx.kernels", description=__doc__)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--force", action="store_true", help="compile even if the cache has them")
    options = parser.parse_args()
    made = build(options.arch, force=options.force)
    print(made.table())
    print(f"{made.cubin}")
    return int(any(usage.spill_stores or usage.spill_loads for usage in made.usage))


if __name__ == "__main__":
    sys.exit(main())
