"""Compile a layer through the pass alone, keep what it said, and compare with eager, gradient by gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from mokfx.passes import Outcome, rewrite
from mokfx.passes.rewrite import graphs_in

FLAGS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
"""What the backend sets so that sizes which are data stay in one graph."""


@dataclass
class Recording:
    """A backend that rewrites the graph and runs it as it is; it keeps what the pass says, and the graph."""

    outcomes: list[Outcome] = field(default_factory=list)
    modules: list[GraphModule] = field(default_factory=list)
    before: list[str] = field(default_factory=list)

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.before.append(module.code)
        self.outcomes.append(rewrite(module))
        self.modules.append(module)
        return module.forward

    @property
    def compiles(self) -> int:
        return len(self.outcomes)

    @property
    def outcome(self) -> Outcome:
        (outcome,) = self.outcomes
        return outcome

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the last graph and of the graphs in it."""
        return [node for module in graphs_in(self.modules[-1]) for node in module.graph.nodes]

    @property
    def calls(self) -> list[Node]:
        """The op's calls."""
        return [node for node in self.nodes if node.target is torch.ops.mok.moe.default]

    def names(self) -> set[str]:
        """The functions and methods that are still called."""
        targets = [node.target for node in self.nodes if node.op.startswith("call_")]
        return {getattr(target, "__name__", str(target)).split(".")[0] for target in targets}


@contextmanager
def compiled(layer: Any, dynamic: bool | None = None) -> Iterator[tuple[Any, Recording]]:
    """`layer` compiled as one graph through a `Recording`."""
    record = Recording()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(**FLAGS):
        yield torch.compile(layer, backend=record, fullgraph=True, dynamic=dynamic), record


def loss_of(outputs: Any) -> Tensor:
    """A sum in which every element of every output counts differently."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(o for o in outputs if isinstance(o, Tensor) and o.is_floating_point()):
        factors = torch.linspace(-1, 2 + i, y.numel(), dtype=torch.float64).view(y.shape)
        loss = loss + (y.double() * factors).sum()
    return loss


@dataclass
class Run:
    """The outputs of one run, and the gradient of `loss_of` for x and for each parameter."""

    outputs: tuple[Any, ...]
    gradients: dict[str, Tensor | None]

    def named(self) -> Iterator[tuple[str, Any]]:
        """Every result and its name."""
        yield from ((f"output {i}", output) for i, output in enumerate(self.outputs))
        yield from ((f"gradient of {name}", gradient) for name, gradient in self.gradients.items())

    def get(self, name: str) -> Any:
        return dict(self.named())[name]


def run(function: Any, layer: nn.Module, *inputs: Any) -> Run:
    """Run `function` (the layer, or the layer compiled) forward and backward; inputs[0] is x."""
    outputs = function(*inputs)
    leaves = {"x": inputs[0], **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(loss_of(outputs), list(leaves.values()), allow_unused=True)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return Run(tuple(outputs), dict(zip(leaves, gradients, strict=True)))


def assert_same(got: Run, wanted: Run, tolerance: float = 1e-10) -> None:
    """Each output and each gradient apart; a gradient that only one run has is a failure."""
    assert [name for name, _ in got.named()] == [name for name, _ in wanted.named()]
    for (name, a), (_, b) in zip(got.named(), wanted.named(), strict=True):
        _assert_close(name, a, b, tolerance)


def _assert_close(name: str, got: Any, wanted: Any, tolerance: float) -> None:
    assert (got is None) == (wanted is None), f"{name}: {got} where {wanted} was expected"
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(
            got, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
        )
    else:
        assert got == wanted, name


def assert_no_farther(got: Run, eager: Run, exact: Run, factor: float = 2.0) -> None:
    """In low precision: each result at most `factor` times as far from the exact one as eager's is."""
    for name, best in exact.named():
        a, b = got.get(name), eager.get(name)
        assert (a is None) == (b is None), f"{name}: {a} where {b} was expected"
        if a is None:
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if not a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=0, atol=0)
            continue
        error, allowed = (float((t.double() - best.double()).detach().norm()) for t in (a, b))
        slack = 1e-3 * float(best.detach().double().norm())  # eager may be right by chance
        assert error <= factor * allowed + slack, f"{name}: {error} from exact, where eager is {allowed}"
