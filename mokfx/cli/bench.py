"""`mokfx bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from mokfx.bench.errors import BenchError
from mokfx.bench.floor import measure_ceilings
from mokfx.bench.layer import make
from mokfx.bench.plot import check_picture, plot
from mokfx.bench.ranks import Ranks, ranks
from mokfx.bench.report import FOOTNOTE, as_json, heading, machine, table
from mokfx.bench.run import ALL, Protocol, Result, bench
from mokfx.bench.shapes import SHAPES, Shape, parse
from mokfx.bench.timeline import check_trace, record, spans, write

from .command import Command, positive
from .progress import progress
from .ranks import process_group

DEFAULT = ("qwen3-30b", "olmoe", "mixtral", "dsv3/32e")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "layers", nargs="*", default=DEFAULT, help=f"{', '.join(SHAPES)}, name@T (other tokens), or numbers H,I,E,k,T"
    )
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--variants", default=",".join(ALL), help="which, and in which order")
    parser.add_argument("--shared", action="store_true", help="with the shared expert of a model that has one")
    parser.add_argument(
        "--weights", choices=("model", "out_in", "in_out"), default="model", help="how expert weights lie in memory"
    )
    parser.add_argument("--calls", type=positive, default=10, help="calls back to back in a group")
    parser.add_argument("--groups", type=positive, default=20, help="groups, of which the median is reported")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, inputs and routing")
    parser.add_argument("--json", type=Path, help="also write everything measured here")
    parser.add_argument("--plot", type=Path, help="also draw TFLOP/s here (.png, .svg, .pdf)")
    parser.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        default=[],
        help="also record the kernel's timeline on the first layer: .json for Perfetto, .png, .svg or .pdf a picture",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the command out")


def _run(arguments: argparse.Namespace) -> int:
    in_out = {"model": None, "out_in": False, "in_out": True}[arguments.weights]
    shapes = [parse(text, shared=arguments.shared, in_out=in_out) for text in arguments.layers]
    variants = arguments.variants.split(",")
    for name in variants:
        if name not in ALL:
            raise BenchError(f"there is no variant {name!r}; there are {', '.join(ALL)}")
    for path in filter(None, (arguments.json, arguments.plot, *arguments.trace)):
        if not path.parent.is_dir():
            raise BenchError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
    if arguments.plot:
        check_picture(arguments.plot)
    for path in arguments.trace:
        check_trace(path)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise BenchError("torch sees no CUDA GPU; --device cpu runs the command on small layers, to try it out")
    protocol = Protocol(arguments.backward, arguments.calls, arguments.groups, arguments.seed)
    with process_group():
        here = ranks(arguments.device)
        if arguments.trace:  # first, while the machine is cool and its clock high
            _trace(here, shapes[0], arguments.seed, arguments.trace)
        results = _measure(here, shapes, variants, protocol, arguments)
    return int(any(result.failed for result in results))


def _measure(
    here: Ranks, shapes: Sequence[Shape], variants: Sequence[str], protocol: Protocol, arguments: argparse.Namespace
) -> list[Result]:
    speaking = here.rank == 0
    doing = progress("bench", shown=speaking)
    with doing("this machine's ceilings"):
        ceilings = measure_ceilings(here, protocol.calls, protocol.groups)
    facts = machine(here)
    if speaking:
        print(heading(facts, ceilings, protocol))
    results: list[Result] = []
    by_layer: list[list[Result]] = []
    for result in bench(shapes, variants, here, protocol, ceilings, doing):
        results.append(result)
        if len(results) % len(variants) == 0:
            by_layer.append(results[-len(variants) :])
            if speaking:
                print(table(by_layer[-1], protocol.backward), flush=True)
                if arguments.json:  # after each layer: a long run that is stopped has not measured for nothing
                    arguments.json.write_text(json.dumps(as_json(facts, ceilings, protocol, by_layer), indent=1))
    if speaking:
        print(FOOTNOTE)
        if arguments.plot:
            plot(arguments.plot, by_layer, ceilings, protocol.backward, heading(facts, ceilings, protocol))
    return results


def _trace(here: Ranks, shape: Shape, seed: int, paths: Sequence[Path]) -> None:
    with torch.no_grad():
        found = spans(record(make(shape, here, seed)))
    title = f"{shape}, {machine(here)['card']}"
    for path in paths:
        write(path, found, title)
        print(f"timeline: {path}")


COMMAND = Command(
    name="bench",
    summary="time an MoE layer: eager, Inductor, the fused op and other packages side by side",
    description="Time one MoE layer, from expert ids to y, as several implementations compute it from the same "
    "tensors, side by side in one run. Each is compared with float32 first, and one that is wrong is not timed. "
    "Under torchrun (torchrun --no-python --nproc-per-node 2 mokfx bench) the experts are shared among the ranks. "
    "Figures: ratios, milliseconds, TFLOP/s, and the fraction of the least possible time by ceilings measured in the "
    "same run. Packages that are not installed are named as absent.",
    add_arguments=_add_arguments,
    run=_run,
)
