"""What a benchmark can say instead of a figure."""

from __future__ import annotations

from mokfx.errors import MokError


class BenchError(MokError):
    """The benchmark cannot be run as asked: an unknown name, or a layer that does not fit."""


class Unavailable(Exception):
    """A variant cannot run this layer here; its message is the reason, in the words of a table's cell."""
