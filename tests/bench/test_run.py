"""What is wrong is refused, what fails or is missing is named, and nothing of it stops the run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

from mokfx.bench import memory, run
from mokfx.bench.errors import BenchError, Unavailable
from mokfx.bench.layer import Layer
from mokfx.bench.ranks import Ranks
from mokfx.bench.shapes import SHAPES, parse
from mokfx.bench.variants import VARIANTS, Step

from .layers import ALONE, SMALL
from .test_report import CEILINGS

QUICK = run.Protocol(backward=True, calls=1, groups=1)


def spoiled(layer: Layer, backward: bool) -> Step:
    step = VARIANTS["eager"](layer, backward)

    def wrong_run() -> list[torch.Tensor]:
        outputs = [tensor.detach().clone() for tensor in step.run()]
        outputs[1][5] = 0  # one row of dx
        return outputs

    return replace(step, run=wrong_run)


def broken(layer: Layer, backward: bool) -> Step:
    return Step(lambda: [torch.zeros(1) @ torch.zeros(2)], lambda outputs: {})


def missing(layer: Layer, backward: bool) -> Step:
    raise Unavailable("it is not installed here")


def test_only_right_answers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ALL", VARIANTS | {"spoiled": spoiled, "broken": broken, "missing": missing})
    names = ("spoiled", "broken", "missing", "eager")
    said: list[str] = []

    def doing(what: str) -> AbstractContextManager[None]:
        said.append(what)
        return nullcontext()

    results = list(run.bench([SMALL, replace(SMALL, tokens=3)], names, ALONE, QUICK, CEILINGS, doing))
    assert [result.variant for result in results] == [*names, *names]
    for first, second, third, fourth in (results[:4], results[4:]):
        assert first.timing is None and first.failed
        assert second.timing is None and second.failed and second.reason.startswith("RuntimeError: ")
        assert third.timing is None and not third.failed and third.reason == "it is not installed here"
        assert fourth.timing is not None and not fourth.failed and fourth.floor is not None
    assert "d_x is off by" in results[0].reason
    steps = ("the right answer in float32", *names)
    assert said == [f"[{number}/2] small: {step}" for number in (1, 2) for step in steps]


def test_a_backward_that_the_provider_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mokfx.bench.variants.unsupported_reason", lambda call: "hopper: it needs gradients")
    (result,) = run.bench([SMALL], ["mok"], ALONE, QUICK, CEILINGS)
    assert result.reason == "hopper: it needs gradients" and result.timing is None and not result.failed


@pytest.mark.parametrize(("free", "fits"), [(139, True), (79, False)])
def test_a_layer_that_does_not_fit_is_refused(free: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, free * 2**30))
    card = Ranks(torch.device("cuda", 0))
    for name in SHAPES:
        memory.check_fits(parse(name), card, backward=False)
    for name in ("dsv3", "kimi-k2"):
        if fits:
            memory.check_fits(parse(name), card, backward=True)
            continue
        with pytest.raises(BenchError, match=rf"{name} needs about \d+ GiB on each GPU, and 79 GiB are free"):
            memory.check_fits(parse(name), card, backward=True)


def test_experts_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(BenchError, match="8 experts cannot be shared evenly by 3 ranks"):
        memory.check_fits(SMALL, Ranks(torch.device("cpu"), 0, 3), False)
