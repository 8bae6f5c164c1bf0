"""`mokfx.compile`: the backend `mok`, with sizes that depend on data kept inside the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

import torch
import torch._dynamo
from torch.fx import GraphModule

from mokfx.backend import mok
from mokfx.options import split_options

_Model = TypeVar("_Model", bound=Callable[..., Any])


@contextlib.contextmanager
def capture_sizes() -> Iterator[None]:
    """Have Dynamo capture `.item()`, `.tolist()`, `nonzero` and their like in what it compiles meanwhile."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@dataclass
class CapturingBackend:
    """The backend `mok` with its arguments bound, and the context that each compiled call runs in.

    Dynamo compiles during calls: the first, and any later one whose guards fail. It lets a backend have a
    context around each of them, by the attribute `backend_ctx_ctor`, on the way by which `dynamic=True`
    works too. So the setting is in force whenever something is compiled and at no other time, and the
    compiled model is torch's own `OptimizedModule`, with everything that it can do.

    Two with equal arguments are equal: Dynamo then uses one compiled code for both, and never one of plain
    `torch.compile`, which may have broken.
    """

    mode: str | None
    options: Mapping[str, Any]
    compiler_name: str = "mok"
    """What Dynamo calls the backend in its messages."""
    backend_ctx_ctor: Callable[[], contextlib.AbstractContextManager[None]] = capture_sizes
    """An attribute of the instance, as Dynamo hands on no other."""

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return mok(gm, example_inputs, mode=self.mode, options=self.options)

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
    backend = CapturingBackend(mode, dict(options or {}))
    optimize = torch._dynamo.optimize(
        backend=cast(Any, backend), nopython=fullgraph, dynamic=dynamic, **kwargs
    )
    compiled: Any = optimize(model)
    if not isinstance(compiled, torch.nn.Module) and compiled is not model:
        compiled._mokfx_captures = True  # for `explain`, which can ask a compiled module but not a function
    return compiled
