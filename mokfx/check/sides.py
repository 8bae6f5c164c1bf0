"""`mokfx.check`: run a model eager, compiled (twice) and in float64, on the same inputs and from the same state."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_fn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mokfx.check.exact import Choices, Recording, in_float64, wide
from mokfx.check.measure import FLOOR, error, far_rows, same_bits
from mokfx.check.result import CheckResult, Comparison
from mokfx.compile import CapturingBackend, compile
from mokfx.explain import explain
from mokfx.undisturbed import undisturbed_dynamo, undisturbed_state

Model = Callable[..., Any]
Tell = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Told what is being done while it is, for a display of progress."""

COMPILED = ("compiled", "compiled and run again")
"""What is told of the runs that may fail by a fault of a compiler, where the others fail by a fault of the model."""

AS_EAGER = {"emulate_precision_casts": True, "fallback_random": True}
"""Inductor rounds where eager does, so that a near tie between two experts falls the same way, and draws the same
random numbers."""


def check(model: Model, *args: Any, **kwargs: Any) -> CheckResult:
    """Compare `model(*args, **kwargs)` and its gradients: compiled, eager, and eager in float64.

    Each output and each gradient of the compiled model is measured by its distance from float64, in units of the
    distance that eager has in the model's own dtype: 1 is as good as eager. It runs twice, for equal bits. Gradients
    are those of a fixed random projection of all outputs, for each parameter and each floating-point input; in
    `no_grad` there are none. Grad mode, autocast and `model.training` are the caller's.

    Parameters, `.grad`, buffers, attributes, random generators and the arguments are afterwards as before. Memory: the
    model's weights and gradients some three times, once of these in float64. In a process group every rank has to call
    this; the result is of this rank.

    Args:
        model: a module or a function; `mokfx.compile` compiles it. One that has been compiled, with backend="mok", is
            taken as it is.
        args, kwargs: its inputs.

    Raises:
        Whatever the model raises, eager or compiled or in float64.
    """
    return checked(model, args, kwargs, lambda _: contextlib.nullcontext())


def checked(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], tell: Tell) -> CheckResult:
    """`check`, which tells what it does."""
    plain = model._orig_mod if isinstance(model, OptimizedModule) else innermost_fn(model)
    dtype = coarsest_dtype(plain, (args, kwargs))
    with tell("eager"), Recording() as recorded:
        eager = run(plain, plain, args, kwargs)
    with tell("traced"):
        given = inputs_of(args, kwargs)  # explain lets the model change its inputs
        report = explain(compile(plain) if model is plain else model, *given.args, **given.kwargs)
    with ready(model, plain) as compiled:
        with tell(COMPILED[0]):
            once = run(compiled, plain, args, kwargs)
        with tell(COMPILED[1]):
            twice = run(compiled, plain, args, kwargs)
    with tell("in float64"):
        exact = run_exactly(plain, args, kwargs, recorded.choices)
    names = list(dict.fromkeys([*exact, *eager, *once]))
    rows = tuple(compare(name, eager.get(name), once.get(name), twice.get(name), exact[name], dtype) for name in names)
    return CheckResult(str(dtype).removeprefix("torch."), rows, report)


Values = dict[str, Tensor | None]
"""Each output, and each gradient: None where there is none."""


def compare(
    name: str, eager: Tensor | None, once: Tensor | None, twice: Tensor | None, exact: Tensor | None, dtype: torch.dtype
) -> Comparison:
    """One row of the result."""
    others = [tensor for tensor in (exact, eager, once) if tensor is not None]
    if not others:
        return Comparison(name, 0.0, 0.0, FLOOR[dtype], True)
    reference = torch.zeros_like(others[0], dtype=torch.float64) if exact is None else exact.double()
    if once is not None and once.shape != reference.shape:
        return Comparison(name, 0.0, float("inf"), FLOOR[dtype], same_bits(once, twice), "has another shape")
    by_eager, by_compiled = error(eager, reference), error(once, reference)
    unit = max(by_eager, FLOOR[dtype])
    note = ""
    if by_compiled > unit and once is None:
        note = "has no gradient"
    elif by_compiled > unit and eager is None:
        note = "has a gradient, eager has none"
    far = (0, 0) if once is None else far_rows(once, reference, 4 * unit)
    return Comparison(name, by_eager, by_compiled, unit, same_bits(once, twice), note, *far)


@contextlib.contextmanager
def ready(model: Model, plain: Model) -> Iterator[Model]:
    """The compiled model: `model` itself if it is one, else compiled for this once."""
    if model is not plain:
        yield model
        return
    backend = CapturingBackend(None, AS_EAGER)
    parameters = inspect.signature(torch._dynamo.eval_frame._optimize).parameters
    options = {"isolate_recompiles": True} if "isolate_recompiles" in parameters else {}
    with undisturbed_dynamo(backend):
        yield torch._dynamo.optimize(backend=cast(Any, backend), **options)(plain)


def run(model: Model, plain: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
    """Call a model on copies of its inputs and differentiate; the state of `plain`, the model behind, stays."""
    with undisturbed_state(plain):
        return values_of(model, parameters_of(plain), inputs_of(args, kwargs))


def run_exactly(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], choices: Choices) -> Values:
    """The same in float64, with these choices."""
    owner = getattr(model, "__self__", model)
    with undisturbed_state(model), in_float64(choices):
        inputs = inputs_of(*tree_map(wide, (args, kwargs)))
        if not isinstance(owner, nn.Module):
            return values_of(model, {}, inputs)
        parameters = {name: wide(p.detach()).requires_grad_(p.requires_grad) for name, p in owner.named_parameters()}
        buffers = {name: wide(buffer.detach().clone()) for name, buffer in owner.named_buffers()}
        with _reparametrize_module(owner, {**parameters, **buffers}, tie_weights=True):
            return values_of(model, parameters, inputs)


@dataclass(frozen=True)
class Inputs:
    """Copies of a call's arguments, and the leaves that stand for those which have gradients."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: dict[str, Tensor]


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    flat, spec = tree_flatten((args, kwargs))
    leaves: dict[str, Tensor] = {}
    copies = []
    for i, value in enumerate(flat):
        if not isinstance(value, Tensor):
            copies.append(value)
            continue
        leaf = value.detach().clone()
        if leaf.is_floating_point() and torch.is_grad_enabled():
            leaves[f"input[{i}]"] = leaf.requires_grad_()
            leaf = leaf.clone()  # a program may change its input in place, which a leaf does not allow
        copies.append(leaf)
    copied_args, copied_kwargs = tree_unflatten(copies, spec)
    return Inputs(copied_args, copied_kwargs, leaves)


def parameters_of(model: Model) -> dict[str, Tensor]:
    owner = getattr(model, "__self__", model)
    return dict(owner.named_parameters()) if isinstance(owner, nn.Module) else {}


def values_of(model: Model, parameters: dict[str, Tensor], inputs: Inputs) -> Values:
    outputs = [leaf for leaf in tree_leaves(model(*inputs.args, **inputs.kwargs)) if isinstance(leaf, Tensor)]
    names = ["output"] if len(outputs) == 1 else [f"output[{i}]" for i in range(len(outputs))]
    values: Values = {name: output.detach().clone() for name, output in zip(names, outputs, strict=True)}
    ends = [output for output in outputs if output.requires_grad]
    wanted = {name: t for name, t in {**parameters, **inputs.leaves}.items() if t.requires_grad}
    if ends and wanted:
        found = torch.autograd.grad(ends, list(wanted.values()), projections(ends), allow_unused=True)
        values |= {f"grad {name}": g for name, g in zip(wanted, found, strict=True)}
    return values


def projections(outputs: list[Tensor]) -> list[Tensor]:
    """What each output's gradient is: fixed random eighths, which are exact in every dtype."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(-8, 9, output.shape, generator=generator) for output in outputs)
    return [numbers.to(output) / 8 for numbers, output in zip(drawn, outputs, strict=True)]


def coarsest_dtype(model: Model, arguments: Any) -> torch.dtype:
    """The model's dtype: the coarsest of its parameters, its inputs and autocast."""
    tensors = [*parameters_of(model).values(), *(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    dtypes = {tensor.dtype for tensor in floats}
    for device in {tensor.device.type for tensor in floats}:
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
    known = [dtype for dtype in dtypes if dtype in FLOOR]
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.get_default_dtype())
