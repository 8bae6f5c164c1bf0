"""Which provider runs a call, and what is said when none does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mokfx.ops import (
    OP,
    Call,
    Provider,
    all_providers,
    fingerprint,
    get_provider,
    register_provider,
    select,
    set_provider,
    unsupported_reason,
    use_provider,
)
from mokfx.ops import providers as registry
from tests.ops.cases import Case, Inputs, build


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has its own registry: `reference`, and the setting "auto"."""
    monkeypatch.setattr(registry, "_providers", {"reference": registry._providers["reference"]})
    monkeypatch.setattr(registry, "_requested", "auto")
    yield


class Fused:
    """A provider that counts its calls and takes only bfloat16 on the devices that it names."""

    def __init__(self, name: str, *devices: str) -> None:
        self.calls: list[str] = []
        self.devices = devices
        register_provider(
            Provider(
                name,
                forward=self.forward,
                forward_saving=self.forward_saving,
                backward=self.backward,
                supports=self.supports,
                saved_shape=lambda call: (2, call.x.shape[0]),
                version=lambda: "7",
            )
        )

    def forward(self, call: Call) -> Tensor:
        self.calls.append("forward")
        return registry._providers["reference"].forward(call)

    def forward_saving(self, call: Call) -> tuple[Tensor, Tensor]:
        self.calls.append("forward_saving")
        return registry._providers["reference"].forward(call), call.x.new_full((2, call.x.shape[0]), 3)

    def backward(self, grad_y: Tensor, call: Call, saved: Tensor | None) -> list[Tensor]:
        self.calls.append("backward" if saved is None else f"backward of {saved.shape} {saved.sum():g}")
        return registry._providers["reference"].backward(grad_y, call, None)

    def supports(self, call: Call) -> str | None:
        if call.x.device.type not in self.devices:
            return f"it runs on {', '.join(self.devices)}, not on {call.x.device.type}"
        return None if call.x.dtype == torch.bfloat16 else f"it takes torch.bfloat16, not {call.x.dtype}"


def call(**changes: Any) -> Call:
    inputs = build(Case(**changes))
    return Call(*inputs.args, **inputs.settings)


def on_meta(inputs: Inputs) -> Call:
    moved = inputs.map(lambda t: t.to("meta"))
    return Call(*moved.args, **moved.settings)


def test_auto_is_the_reference_on_the_cpu() -> None:
    Fused("fused", "cpu")
    assert select(call(dtype=torch.bfloat16)).name == "reference"
    assert unsupported_reason(call()) is None


def test_auto_on_another_device_is_the_first_fused_provider_that_can() -> None:
    Fused("never", "xpu")
    Fused("fused", "meta")
    Fused("also", "meta")
    assert select(on_meta(build(Case(dtype=torch.bfloat16)))).name == "fused"


def test_auto_names_each_providers_reason() -> None:
    Fused("never", "xpu")
    Fused("fused", "meta")
    text = (
        "no fused provider runs this call on meta (never: it runs on xpu, not on meta; "
        "fused: it takes torch.bfloat16, not torch.float64); set_provider('reference') runs it, slowly"
    )
    assert unsupported_reason(on_meta(build(Case()))) == text
    with pytest.raises(RuntimeError, match=re.escape(f"mok.moe: {text}")):
        select(on_meta(build(Case())))


def test_auto_without_any_fused_provider() -> None:
    assert unsupported_reason(on_meta(build(Case()))) == (
        "no fused provider runs this call on meta (none is registered); "
        "set_provider('reference') runs it, slowly"
    )


def test_the_reference_may_be_asked_for_anywhere() -> None:
    assert select(on_meta(build(Case())), "reference").name == "reference"


def test_a_named_provider_is_taken_or_says_why_not() -> None:
    Fused("fused", "cpu")
    assert select(call(dtype=torch.bfloat16), "fused").name == "fused"
    text = "provider 'fused' cannot run this call: it takes torch.bfloat16, not torch.float64"
    assert unsupported_reason(call(), "fused") == text
    with pytest.raises(RuntimeError, match=re.escape(text)):
        select(call(), "fused")


def test_an_unknown_name() -> None:
    text = "mok.moe: unknown provider 'blackwell'; it must be one of auto, reference"
    for ask in (
        set_provider,
        lambda name: select(call(), name),
        lambda name: unsupported_reason(call(), name),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            ask("blackwell")
    assert get_provider() == "auto"


def test_a_taken_name() -> None:
    for name in ("reference", "auto"):
        with pytest.raises(
            ValueError, match=f"a provider named '{name}' exists already; choose another name"
        ):
            Fused(name)
    assert [provider.name for provider in all_providers()] == ["reference"]


def test_the_setting_decides_what_the_op_runs_forward_and_backward() -> None:
    fused = Fused("fused", "cpu")
    inputs = build(Case(dtype=torch.bfloat16)).require_grad()
    with use_provider("fused"):
        assert get_provider() == "fused"
        OP(*inputs.args, **inputs.settings).sum().backward()
    assert fused.calls == ["forward_saving", "backward of torch.Size([2, 11]) 66"]
    assert get_provider() == "auto"
    OP(*inputs.args, **inputs.settings)
    set_provider("fused")
    with torch.no_grad():
        OP(*inputs.args, **inputs.settings)
    assert fused.calls[2:] == ["forward"]


def test_what_the_forward_saved_reaches_the_backward_of_compiled_code() -> None:
    fused = Fused("fused", "cpu")
    inputs = build(Case(dtype=torch.bfloat16)).require_grad()
    compiled = torch.compile(lambda x: OP(x, *inputs.args[1:], **inputs.settings).cos(), backend="aot_eager")
    with use_provider("fused"):
        compiled(inputs.args[0]).sum().backward()
    assert fused.calls == ["forward_saving", "backward of torch.Size([2, 11]) 66"]


def test_the_setting_holds_for_compiled_code() -> None:
    fused = Fused("fused", "cpu")
    inputs = build(Case(dtype=torch.bfloat16))
    compiled = torch.compile(lambda x: OP(x, *inputs.args[1:], **inputs.settings), backend="aot_eager")
    compiled(inputs.args[0])
    with use_provider("fused"):
        compiled(inputs.args[0])
    assert fused.calls == ["forward"]


def test_the_setting_is_restored_after_an_error() -> None:
    Fused("fused", "cpu")
    with pytest.raises(KeyError), use_provider("fused"):
        raise KeyError
    assert get_provider() == "auto"


def test_the_fingerprint_is_stable_and_knows_providers() -> None:
    first = fingerprint()
    assert re.fullmatch(r"[0-9a-f]{64}", first) and fingerprint() == first
    Fused("fused", "cpu")
    assert fingerprint() != first


def test_the_fingerprint_knows_the_sources(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from pathlib import Path

    import mokfx.ops

    before = fingerprint()
    copy = tmp_path / "ops"
    shutil.copytree(Path(mokfx.ops.__file__).parent, copy)
    monkeypatch.setattr(mokfx.ops, "__file__", str(copy / "__init__.py"))
    assert fingerprint() == before
    with (copy / "activations.py").open("a") as source:
        source.write("# changed\n")
    assert fingerprint() != before
