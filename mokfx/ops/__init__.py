"""The op `mok::moe` and its gradients; schema.py documents every argument. Importing this registers them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mokfx.kernels.settings import settings as _settings
from mokfx.ops import autocast as autocast
from mokfx.ops import autograd as autograd
from mokfx.ops import dispatch as dispatch
from mokfx.ops import fake as fake
from mokfx.ops.arguments import Call
from mokfx.ops.checks import check
from mokfx.ops.providers import (
    Provider,
    all_providers,
    get_provider,
    register_provider,
    select,
    set_provider,
    unsupported_reason,
    use_provider,
)
from mokfx.ops.schema import MOE as OP

__all__ = [
    "OP",
    "Call",
    "Provider",
    "all_providers",
    "check",
    "configure",
    "fingerprint",
    "get_provider",
    "register_provider",
    "select",
    "set_provider",
    "unsupported_reason",
    "use_provider",
]


def configure(*, timeout_s: float | None = None, recompute: bool | None = None) -> None:
    """Settings of the fused kernels for the whole process; None leaves one as it is.

    Args:
        timeout_s: seconds that any wait inside a kernel may take before it gives up with a reason; at first 60.
        recompute: keep no pre-activations for the backward, which then computes the first layer again; at first
            False. Code that was compiled before keeps what it was compiled to keep.
    """
    if timeout_s is not None:
        _settings.timeout_s = timeout_s
    if recompute is not None:
        _settings.recompute = recompute


def fingerprint() -> str:
    """A hash of all that decides the ops' meaning: the sources of this package and each provider's version.

    torch's compile caches hash no custom op's Python; with this as salt they are not served stale.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for provider in all_providers():
        digest.update(f"{provider.name}={provider.version()}\0".encode())
    return digest.hexdigest()
