"""The run: each layer, each variant: made, checked against the truth, timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from .errors import Unavailable
from .floor import Ceilings, Floor, floor
from .layer import Layer, make
from .measure import Timing, time_calls
from .memory import check_fits
from .peers import PEERS
from .ranks import Ranks
from .shapes import Shape
from .truth import Truth, distances, truth, wrong
from .variants import VARIANTS, Make, Step

ALL: dict[str, Make] = VARIANTS | PEERS


@dataclass(frozen=True)
class Protocol:
    """What is timed and how: `calls` back to back, `groups` such; `backward`: forward and backward together."""

    backward: bool = False
    calls: int = 10
    groups: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What one variant did on one layer. `timing` is None if it was not timed, and `reason` says why.

    `note` is what a reader of the figure should know; `failed` tells a wrong answer or an exception, which are faults,
    from a variant that cannot run here.
    """

    shape: Shape
    variant: str
    timing: Timing | None = None
    reason: str = ""
    note: str = ""
    failed: bool = False
    errors: Mapping[str, float] = field(default_factory=dict)
    floor: Floor | None = None

    def tflops(self, backward: bool) -> float:
        """TFLOP/s of each rank: the experts' products, which with a backward are three times the forward's."""
        assert self.timing is not None
        return self.shape.flops * (3 if backward else 1) / self.timing.median / 1e9


Doing = Callable[[str], AbstractContextManager[None]]
"""Says what is done in its `with`."""


def bench(
    shapes: Sequence[Shape],
    variants: Sequence[str],
    ranks: Ranks,
    protocol: Protocol,
    ceilings: Ceilings,
    doing: Doing = lambda what: nullcontext(),
) -> Iterator[Result]:
    """A result as each variant is done, layer by layer. A collective.

    Raises BenchError before the first, if a layer does not fit.
    """
    for shape in shapes:
        check_fits(shape, ranks, protocol.backward)
    for number, shape in enumerate(shapes):
        named = f"[{number + 1}/{len(shapes)}] {shape.name}"
        with doing(f"{named}: the right answer in float32"):
            layer = make(shape, ranks, protocol.seed)
            right = truth(layer, protocol.backward)
        layer.require_gradients(protocol.backward)
        for name in variants:
            least = floor(shape, ranks.size, ceilings, protocol.backward)
            with doing(f"{named}: {name}"), torch.set_grad_enabled(protocol.backward):
                result = _measure(layer, name, right, ranks, protocol, least)
            release(ranks)
            yield result
        del layer, right
        release(ranks)


def release(ranks: Ranks) -> None:
    """Gives memory back to the device, where the next variant may want it outside of torch."""
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def _measure(layer: Layer, name: str, right: Truth, ranks: Ranks, protocol: Protocol, least: Floor) -> Result:
    try:
        step, reason = ALL[name](layer, protocol.backward), ""
    except Unavailable as error:
        step, reason = None, str(error)
    reason = next(filter(None, ranks.share(reason)), "")  # all ranks call it, or none does
    if step is None or reason:
        return Result(layer.shape, name, reason=reason)
    try:
        errors = _check(step, right)
        worst = next(filter(None, ranks.share(wrong(errors))), None)
        if worst is not None:
            return Result(layer.shape, name, reason=worst, failed=True, errors=errors)
        timing = time_calls(step.run, ranks, protocol.calls, protocol.groups)
    except Exception as error:  # of whatever package the variant is
        if ranks.size > 1:  # the others are in the middle of a collective
            raise
        first = str(error).strip().partition("\n")[0]
        return Result(layer.shape, name, reason=f"{type(error).__name__}: {first}", failed=True)
    return Result(layer.shape, name, timing, note=step.note, errors=errors, floor=least)


def _check(step: Step, right: Truth) -> dict[str, float]:
    if step.gradients is None:
        return {}
    poison(right.y.device)
    outputs = step.run()
    with torch.no_grad():
        return distances(right, outputs[0], step.gradients(outputs))


def poison(device: torch.device) -> None:
    """Fills memory that torch's allocator hands out next with NaN, so that what a variant leaves unwritten shows."""
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0]
    blocks = [torch.full((2**28,), 0xFF, dtype=torch.uint8, device=device) for _ in range(min(free // 2**29, 16))]
    blocks += [torch.full((2**18,), 0xFF, dtype=torch.uint8, device=device) for _ in range(64)]
    del blocks
