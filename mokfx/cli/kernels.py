"""`mokfx kernels build`."""

from __future__ import annotations

import argparse

from mokfx.errors import MokError
from mokfx.kernels.build import ARCHITECTURES, build_all, table
from mokfx.kernels.driver import SHARED_BYTES

from .command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action")
    build = actions.add_parser(
        "build",
        help="compile them now, into the cache in which the first use would look",
        description="Compile every CUDA kernel into the user's cache, so that the first use finds it. Needs nvcc 12.8 "
        "or newer and no GPU. Ends with the registers, shared memory and spilled bytes of each kernel; the exit code "
        "is 1 if any spills.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    build.add_argument("--arch", default=ARCHITECTURES[0], help=f"architecture: {', '.join(ARCHITECTURES)}")
    build.add_argument("--force", action="store_true", help="compile even what the cache has")


def _run(arguments: argparse.Namespace) -> int:
    try:
        builds = build_all(arguments.arch, force=arguments.force)
    except (ValueError, RuntimeError) as error:
        raise MokError(str(error)) from error
    for build in builds:
        print(build.cubin)
    print(table(builds))
    print(f"Every launch adds {SHARED_BYTES} bytes of dynamic shared memory a block.")
    return int(any(usage.spilled for build in builds for usage in build.usage))


COMMAND = Command(
    name="kernels",
    summary="compile the Hopper kernels ahead of time",
    description="Compile the Hopper kernels ahead of time.",
    add_arguments=_add_arguments,
    run=_run,
)
