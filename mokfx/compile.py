"""`mokfx.compile`: the backend `mok`, with sizes that depend on data kept inside the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import torch
import torch._dynamo
from torch._dynamo.variables import TensorVariable
from torch.fx import GraphModule

from mokfx.backend import mok
from mokfx.capture import Capture, substitutions
from mokfx.integrations import prepare
from mokfx.options import split_options

_Model = TypeVar("_Model", bound=Callable[..., Any])


_SUBSTITUTES = hasattr(TensorVariable, "richcompare_impl")
"""Whether this Dynamo (torch 2.13) has the places at which `mokfx.capture` answers it."""


@contextlib.contextmanager
def capture_sizes() -> Iterator[None]:
    """Have Dynamo capture `.item()`, `.tolist()`, `nonzero` and their like, by its own settings."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@contextlib.contextmanager
def capturing(session: Capture) -> Iterator[None]:
    """Have Dynamo also capture what `mokfx.capture` can prove: loops over hit experts, tests for empty ones.

    Args:
        session: what the substitutions keep a record in, one for each compiled model.
    """
    with capture_sizes(), substitutions(session) if _SUBSTITUTES else contextlib.nullcontext():
        yield


class CapturingBackend:
    """The backend `mok` with its arguments bound, and the context that each compiled call runs in.

    Dynamo compiles during calls: the first, and any later one whose guards fail. It lets a backend have a
    context around each of them, by the attribute `backend_ctx_ctor`, on the way by which `dynamic=True`
    works too. So `capturing` is in force whenever something is compiled and at no other time, and the
    compiled model is torch's own `OptimizedModule`, with everything that it can do.

    Two with equal arguments are equal: Dynamo then uses one compiled code for both, and never one of plain
    `torch.compile`, which may have broken.
    """

    def __init__(self, mode: str | None, options: Mapping[str, Any]) -> None:
        self.compiler_name = "mok"
        """What Dynamo calls the backend in its messages."""
        self.arguments = (mode, dict(options))
        self.session = Capture()
        self.backend_ctx_ctor = lambda: capturing(self.session)
        """An attribute of the instance, since Dynamo hands on no other."""
        self._told = 0

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        mode, options = self.arguments
        refused = self.session.misses[self._told :]
        compiled = mok(gm, example_inputs, mode=mode, options=options, refused=refused)
        self._told += len(refused)
        return compiled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CapturingBackend) and self.arguments == other.arguments

    __hash__ = None  # type: ignore[assignment]

    def reset(self) -> None:
        mok.reset()


@overload
def compile(
    model: _Model,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    **kwargs: Any,
) -> _Model: ...


@overload
def compile(
    model: None = ...,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    **kwargs: Any,
) -> Callable[[_Model], _Model]: ...


def compile(
    model: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Compile `model` as `torch.compile(model, backend="mok")` does, keeping MoE layers in one graph.

    Token counts decide sizes in an MoE layer (`counts.tolist()`, `nonzero`), and there plain
    `torch.compile` ends a graph. Here it does not; unlike with `fullgraph=True`, whatever else Dynamo
    cannot capture still breaks the graph and is no error. Global config is as before once a call returns.

    Args:
        model: a module or a function; left out, the result is a decorator.
        fullgraph, dynamic: as in `torch.compile`.
        mode: as in `torch.compile`; not together with `options`.
        options: `mok.` options and Inductor's.
        kwargs: what else `torch._dynamo.optimize` takes (`disable`, `guard_filter_fn`, ...).

    Returns:
        What `torch.compile` returns: for a module an `OptimizedModule`, otherwise a function.

    Raises:
        OptionError: `mode` or `options` is not understood.
        ValueError: both `mode` and `options` are given.
    """
    if mode is not None and options:
        raise ValueError("both mode and options are given, and torch.compile takes only one of the two")
    split_options(mode, options)
    if model is None:
        return lambda model: compile(
            model, fullgraph=fullgraph, dynamic=dynamic, mode=mode, options=options, **kwargs
        )
    prepare(model)
    backend = CapturingBackend(mode, options or {})
    optimize = torch._dynamo.optimize(
        backend=cast(Any, backend), nopython=fullgraph, dynamic=dynamic, **kwargs
    )
    compiled: Any = optimize(model)
    if not isinstance(compiled, torch.nn.Module) and compiled is not model:
        compiled._mokfx_captures = True  # for `explain`, which can ask a compiled module but not a function
    return compiled
