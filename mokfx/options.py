"""The options of the backend: mokfx's own under `mok.`, all others Inductor's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from mokfx.errors import OptionError
from mokfx.ops import all_providers

PREFIX = "mok."


@dataclass(frozen=True)
class MokOptions:
    """What `options={"mok.<field>": value}` sets."""

    enabled: bool = True
    """False leaves every graph as it is, for a comparison: the backend is then Inductor alone."""
    on_miss: Literal["ignore", "warn", "raise"] = "ignore"
    """What to do about something that looks like an MoE layer and is left alone."""
    provider: str = "auto"
    """What runs the op, in the whole process. "auto" leaves the setting of the process: at first the fused
    provider of the device, and `reference` on the CPU."""
    timeout_s: float | None = None
    """Seconds that a wait inside a fused kernel may take before it gives up with a reason, in the whole process.
    None leaves the setting of the process: at first 60."""
    recompute: bool | None = None
    """Whether a fused kernel keeps nothing for the backward but the layer's inputs, and computes pre-activations
    again, in the whole process. None leaves the setting of the process: at first it keeps them."""
    compiler: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """What compiles the rest of the graph. The other two are for debugging: no code is generated."""


def split_options(mode: str | None, options: Mapping[str, Any] | None) -> tuple[MokOptions, dict[str, Any]]:
    """Sort the arguments of `torch.compile` into mokfx's options and a patch of Inductor's config.

    Args:
        mode: a mode of `torch.compile`, such as "max-autotune".
        options: keys that begin with `mok.` are fields of `MokOptions`, the others belong to Inductor.

    Raises:
        OptionError: an unknown mode, an option that neither knows, or a value that the option cannot take.
    """
    own = {key: value for key, value in (options or {}).items() if key.startswith(PREFIX)}
    rest = {key: value for key, value in (options or {}).items() if not key.startswith(PREFIX)}
    parsed = _parse(own)
    patches = _inductor_config(mode, rest)
    if patches and parsed.compiler != "inductor":
        raise OptionError(
            f"{', '.join(sorted(patches))}: set for Inductor, but mok.compiler is {parsed.compiler!r}; "
            "remove one of the two"
        )
    return parsed, patches


def _parse(options: Mapping[str, Any]) -> MokOptions:
    hints = get_type_hints(MokOptions)
    names = [PREFIX + field.name for field in fields(MokOptions)]
    for key, value in options.items():
        if key not in names:
            raise OptionError(f"unknown option {key!r}{_suggest(key, names)}; mokfx has {', '.join(names)}")
        if float in get_args(hints[key.removeprefix(PREFIX)]):
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise OptionError(f"{key} is {value!r}; it takes a positive number of seconds")
            continue
        allowed = _choices(key.removeprefix(PREFIX), hints[key.removeprefix(PREFIX)])
        # `1 == True`: the type has to agree as well as the value.
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            listed = ", ".join(map(repr, allowed))
            raise OptionError(f"{key} is {value!r}{_suggest(value, allowed)}; it takes one of {listed}")
    return MokOptions(**{key.removeprefix(PREFIX): value for key, value in options.items()})


def _choices(name: str, hint: Any) -> tuple[Any, ...]:
    if name == "provider":
        return ("auto", *(provider.name for provider in all_providers()))
    return get_args(hint) if get_origin(hint) is Literal else (True, False)


def _inductor_config(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The config patch that `backend="inductor"` would make of the same arguments."""
    known = torch._inductor.list_options()
    for key in options:
        if key.replace("-", "_") not in known:
            own = [PREFIX + field.name for field in fields(MokOptions)]
            raise OptionError(
                f"unknown option {key!r}{_suggest(key, [*own, *known])}; it is none of mokfx's "
                f"({', '.join(own)}), nor of Inductor's (torch._inductor.list_options())"
            )
    try:
        # torch's own parser of the two, so that a mode and a wrong type mean the same under both backends.
        return dict(torch._TorchCompileInductorWrapper(mode, dict(options), None).config)
    except RuntimeError as error:
        raise OptionError(str(error)) from None


def _suggest(name: Any, known: Any) -> str:
    texts = [text for text in known if isinstance(text, str)]
    close = difflib.get_close_matches(name, texts, n=1) if isinstance(name, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""
