"""`mokfx.check`: eager, compiled and float64, side by side."""

from mokfx.check.result import CheckResult, Comparison
from mokfx.check.sides import check

__all__ = ["CheckResult", "Comparison", "check"]
