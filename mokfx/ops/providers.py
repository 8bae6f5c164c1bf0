"""Providers: the implementations of the op, and which of them runs a call.

The choice is a setting of the process, not of a call site: `set_provider("reference")`, or for a part of a
program `with use_provider("reference"):`. "auto", the default, means `reference` on the CPU and, on any other
device, the first fused provider that supports the call. The setting is read when the op runs, so it holds for
compiled code too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mokfx.ops.arguments import Call

REFERENCE = "reference"
AUTO = "auto"


@dataclass(frozen=True)
class Provider:
    """An implementation of the ops; its calls passed `check`."""

    name: str
    forward: Callable[[Call], Tensor]
    """y of the call."""
    forward_saving: Callable[[Call], tuple[Tensor, Tensor]]
    """y, and what the backward wants besides the call: x's dtype, and `saved_shape`."""
    backward: Callable[[Tensor, Call, Tensor | None], list[Tensor]]
    """From grad_y, the call and what was saved, if it was, the gradients as schema.py orders them."""
    supports: Callable[[Call], str | None]
    """None, or the reason why not. Asked about fake tensors as well: it reads no values."""
    saved_shape: Callable[[Call], tuple[int | torch.SymInt, ...]]
    """Of what `forward_saving` keeps: two sizes or more, or `(0,)` for nothing. Asked about fake tensors as well."""
    version: Callable[[], str]
    """What changes when its numbers may: it becomes part of `fingerprint()`."""


_providers: dict[str, Provider] = {}
_requested = AUTO


def register_provider(provider: Provider) -> None:
    """Make an implementation known; "auto" asks providers in the order of registration.

    Raises:
        ValueError: the name is taken.
    """
    if provider.name in _providers or provider.name == AUTO:
        raise ValueError(f"mok.moe: a provider named {provider.name!r} exists already; choose another name")
    _providers[provider.name] = provider


def all_providers() -> tuple[Provider, ...]:
    """All registered providers, in the order of registration."""
    return tuple(_providers.values())


def set_provider(name: str) -> None:
    """Choose what runs every later call in this process: a provider's name, or "auto".

    Raises:
        ValueError: no provider has that name.
    """
    global _requested
    if name != AUTO:
        _named(name)
    _requested = name


def get_provider() -> str:
    """The process's setting: a provider's name, or "auto"."""
    return _requested


@contextmanager
def use_provider(name: str) -> Iterator[None]:
    """`set_provider(name)` for the body of a with statement; a backward that runs later is outside of it."""
    before = _requested
    set_provider(name)
    try:
        yield
    finally:
        set_provider(before)


def select(call: Call, requested: str | None = None) -> Provider:
    """The provider that runs `call`.

    Args:
        requested: a provider's name or "auto"; None: the process's setting.

    Raises:
        ValueError: no provider has the requested name.
        RuntimeError: the requested provider does not support the call, or "auto" finds none that does; the
            message names each provider's reason.
    """
    found = _select(call, _requested if requested is None else requested)
    if isinstance(found, str):
        raise RuntimeError(f"mok.moe: {found}")
    return found


def unsupported_reason(call: Call, requested: str | None = None) -> str | None:
    """None if `select` with the same arguments gives a provider, else its reason. Works on fake tensors.

    Raises:
        ValueError: no provider has the requested name.
    """
    found = _select(call, _requested if requested is None else requested)
    return found if isinstance(found, str) else None


def _select(call: Call, requested: str) -> Provider | str:
    device = call.x.device.type
    if requested == AUTO and device == "cpu":
        requested = REFERENCE
    if requested != AUTO:
        provider = _named(requested)
        reason = provider.supports(call)
        return provider if reason is None else f"provider {requested!r} cannot run this call: {reason}"
    reasons = []
    for provider in all_providers():
        if provider.name == REFERENCE:
            continue  # right, but slow: on an accelerator only at request
        reason = provider.supports(call)
        if reason is None:
            return provider
        reasons.append(f"{provider.name}: {reason}")
    why = "; ".join(reasons) if reasons else "none is registered"
    return f"no fused provider runs this call on {device} ({why}); set_provider('reference') runs it, slowly"


def _named(name: str) -> Provider:
    if name not in _providers:
        raise ValueError(
            f"mok.moe: unknown provider {name!r}; it must be one of {', '.join([AUTO, *_providers])}"
        )
    return _providers[name]
