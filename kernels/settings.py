"""What holds for all launches of the process; `mokfx.ops.configure` sets it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """Read at every call."""

    timeout_s: float = 60.0
    """Seconds that any wait inside a kernel may take before the launch gives up with a reason."""
    recompute: bool = False
    """Keep no pre-activations for the backward, which then computes the first layer again."""


settings = Settings()
