"""What mokfx raises and warns."""

from __future__ import annotations

from torch._dynamo.exc import ShortenTraceback

from mokfx.passes.outcome import Miss


class MokError(ShortenTraceback):
    """Base of mokfx's errors; a RuntimeError.

    Dynamo wraps whatever a backend raises in `BackendCompilerFailed`, except its own kind: a subclass of
    `ShortenTraceback` arrives unchanged, so that `except mokfx.MissError` works around a compiled call.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class OptionError(MokError):
    """An option of the backend has an unknown name or a value it cannot take."""


class MissError(MokError):
    """With `mok.on_miss="raise"`: something that looks like an MoE layer was left alone.

    Attributes:
        misses: every miss of the graph, each with its `reason` and `where`.
    """

    def __init__(self, misses: tuple[Miss, ...]) -> None:
        self.misses = misses
        found = "1 MoE layer was" if len(misses) == 1 else f"{len(misses)} MoE layers were"
        lines = "\n".join(f"  {describe_miss(miss)}" for miss in misses)
        super().__init__(f"{found} left alone, and mok.on_miss is 'raise':\n{lines}")


class MissWarning(UserWarning):
    """With `mok.on_miss="warn"`: something that looks like an MoE layer was left alone."""


def describe_miss(miss: Miss) -> str:
    """One line: ``model.py:57 `code`: reason``."""
    place = f"{miss.where} `{miss.code}`" if miss.code else miss.where
    return f"{place}: {miss.reason}"
