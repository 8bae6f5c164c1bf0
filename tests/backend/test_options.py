"""Options: ours by name and value, Inductor's as backend="inductor" takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mokfx
from mokfx.kernels.settings import settings
from mokfx.ops import configure, fingerprint, get_provider, set_provider
from mokfx.options import MokOptions, split_options

from .models import Dense, Expert

OWN = "mok.enabled, mok.on_miss, mok.provider, mok.timeout_s, mok.recompute, mok.compiler"


def test_split() -> None:
    own, patches = split_options(None, {"mok.on_miss": "warn", "epilogue-fusion": False})
    assert own == MokOptions(on_miss="warn")
    assert patches == {"epilogue_fusion": False}
    assert split_options("default", None) == (MokOptions(), {})


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"])
def test_mode_is_what_inductor_makes_of_it(mode: str) -> None:
    assert split_options(mode, None)[1] == torch._inductor.list_mode_options(mode)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mok.on_mis": "warn"},
            f"unknown option 'mok.on_mis' (did you mean 'mok.on_miss'?); mokfx has {OWN}",
        ),
        (
            {"mok.on_miss": "rais"},
            "mok.on_miss is 'rais' (did you mean 'raise'?); it takes one of 'ignore', 'warn', 'raise'",
        ),
        ({"mok.enabled": 1}, "mok.enabled is 1; it takes one of True, False"),
        ({"mok.timeout_s": 0}, "mok.timeout_s is 0; it takes a positive number of seconds"),
        ({"mok.timeout_s": True}, "mok.timeout_s is True; it takes a positive number of seconds"),
        ({"mok.recompute": "yes"}, "mok.recompute is 'yes'; it takes one of True, False"),
        ({"mok.compiler": None}, "mok.compiler is None; it takes one of 'inductor', 'aot_eager', 'eager'"),
        (
            {"max_autotun": True},
            "unknown option 'max_autotun' (did you mean 'max_autotune'?); it is none of mokfx's "
            f"({OWN}), nor of Inductor's (torch._inductor.list_options())",
        ),
        ({"max_autotune": "yes"}, "Unexpected type of attr max_autotune, got str should be bool"),
        (
            {"max_autotune": True, "mok.compiler": "eager"},
            "max_autotune: set for Inductor, but mok.compiler is 'eager'; remove one of the two",
        ),
    ],
)
def test_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(mokfx.OptionError) as raised:
        split_options(None, options)
    assert str(raised.value) == message


def test_unknown_provider_lists_those_that_are_there() -> None:
    with pytest.raises(mokfx.OptionError, match=r"mok\.provider is 'referense'.*'auto', 'reference'"):
        split_options(None, {"mok.provider": "referense"})


def test_unknown_mode() -> None:
    with pytest.raises(mokfx.OptionError, match="Unrecognized mode=fast, should be one of: default"):
        split_options("fast", None)


def test_errors_reach_the_caller_of_a_compiled_model() -> None:
    compiled = torch.compile(Expert(), backend="mok", options={"mok.nonsense": 1})
    with pytest.raises(mokfx.OptionError, match=r"unknown option 'mok\.nonsense'"):
        compiled(torch.randn(3, 8))


def test_mokfx_compile_rejects_at_once() -> None:
    with pytest.raises(mokfx.OptionError, match=r"unknown option 'mok\.nonsense'"):
        mokfx.compile(Expert(), options={"mok.nonsense": 1})
    with pytest.raises(ValueError, match="both mode and options are given"):
        mokfx.compile(Expert(), mode="max-autotune", options={"mok.on_miss": "warn"})


def test_provider_is_the_process_s() -> None:
    model, x = Dense().eval(), torch.randn(3, 8)
    try:
        options = {"mok.provider": "reference", "mok.compiler": "eager"}
        torch.compile(model, backend="mok", options=options)(x)
        assert get_provider() == "reference"
    finally:
        set_provider("auto")


def test_the_kernels_settings_are_the_process_s_and_part_of_the_cache_key() -> None:
    before = fingerprint()
    try:
        options = {"mok.timeout_s": 2.5, "mok.recompute": True, "mok.compiler": "eager"}
        torch.compile(Dense().eval(), backend="mok", options=options)(torch.randn(3, 8))
        assert (settings.timeout_s, settings.recompute) == (2.5, True)
        assert fingerprint() != before, "code that keeps pre-activations must not be served"
        torch.compile(Expert(), backend="mok", options={"mok.compiler": "eager"})(torch.randn(3, 8))
        assert (settings.timeout_s, settings.recompute) == (2.5, True), "what is not given stays"
    finally:
        configure(timeout_s=60.0, recompute=False)
    assert fingerprint() == before


def test_inductor_s_options_reach_inductor() -> None:
    seen: list[bool] = []

    def note(graph: torch.fx.Graph) -> None:
        seen.append(torch._inductor.config.epilogue_fusion)

    options = {"epilogue_fusion": False, "post_grad_custom_post_pass": note}
    x = torch.randn(3, 8, requires_grad=True)
    torch.compile(Expert(), backend="mok", options=options)(x).sum().backward()
    assert seen == [False, False], "one for the forward, one for the backward, which is compiled later"
