"""Command line of the benchmark."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from .measure import time_calls
from .shapes import SHAPES, parse
from .variants import VARIANTS, make


def main() -> int:
    """Prints a line for each shape and variant as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m mokfx.bench", description=__doc__)
    parser.add_argument(
        "shapes",
        nargs="*",
        default=["qwen3-30b", "olmoe", "mixtral", "dsv3/32e"],
        help=f"{', '.join(SHAPES)}, name@T or H,I,E,k,T",
    )
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated: " + ", ".join(VARIANTS))
    parser.add_argument("--calls", type=int, default=10, help="calls back to back in a group")
    parser.add_argument("--groups", type=int, default=20, help="groups, of which the median is reported")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("mokfx.bench needs a CUDA GPU and torch sees none", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", end=", ")
    print(f"{options.calls} calls back to back, median of {options.groups}")
    print(f"{'shape':<14}{'variant':<12}{'ms':>9}{'fastest':>9}{'slowest':>9}{'TFLOP/s':>9}")
    results = []
    for name in options.shapes:
        shape = parse(name)
        layer = make(shape)
        for variant in options.variants.split(","):
            timing = time_calls(VARIANTS[variant](layer), options.calls, options.groups)
            tflops = shape.flops / timing.median / 1e9
            print(
                f"{shape.name:<14}{variant:<12}{timing.median:>9.3f}{timing.low:>9.3f}{timing.high:>9.3f}{tflops:>9.0f}",
                flush=True,
            )
            results.append(
                {
                    "shape": dataclasses.asdict(shape),
                    "variant": variant,
                    "tflops": tflops,
                    **dataclasses.asdict(timing),
                }
            )
        del layer
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
