"""`mokfx doctor`: what is on this machine, what would run the op here, and what to do about what is missing."""

from mokfx.doctor.finding import Finding, examined
from mokfx.doctor.probes import PROBES

__all__ = ["PROBES", "Finding", "examine"]


def examine() -> list[Finding]:
    """Run every probe; in a process group, on every rank. Never raises: a probe that fails is a finding."""
    return [finding for name, probe in PROBES.items() for finding in examined(name, probe)]
