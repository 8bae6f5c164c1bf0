"""Figures as people read them."""

from __future__ import annotations


def _scaled(value: float, unit: str, base: float, prefixes: str) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(prefixes) - 1:
        value /= base
        power += 1
    return f"{number(value)} {prefixes[power].strip()}{unit}"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.995 else 3
    return f"{value:.{digits}f}"


def of_bytes(value: float) -> str:
    """`1.5 MB`, in powers of 1000, as bandwidths are."""
    return _scaled(value, "B", 1000.0, " kMGT")


def of_flops(value: float) -> str:
    """`618 GFLOP`."""
    return _scaled(value, "FLOP", 1000.0, " kMGTP")


def of_seconds(value: float) -> str:
    """`0.782 ms`, `13.2 \u00b5s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("\u00b5s", 1e-6)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{number(value * 1e9)} ns"
