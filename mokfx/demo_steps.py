"""What the demo does on each rank: compile, explain, compare with eager, train beside eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mokfx.demo_model import Block
from mokfx.explain import explain

VOCABULARY, BATCH, SEQUENCE = 64, 4, 32
TOLERANCE = 1e-10
"""Largest difference allowed, as a part of the largest value; in float64 rounding hides nothing."""


class DemoError(RuntimeError):
    """The demo found that compiled and eager differ, or that nothing was compiled as it should be."""


def demonstrate(steps: int, seed: int, group: dist.ProcessGroup | None = None) -> None:
    """The whole demo of this rank, on standard output.

    Args:
        steps: training steps.
        seed: of the weights and the data.
        group: expert-parallel group; None on one rank.

    Raises:
        DemoError: no MoE layer was rewritten, or a value or a gradient differs from eager's.
    """
    eager, model = (_model(seed, group) for _ in range(2))
    compiled = torch.compile(model, backend="mok", fullgraph=True, options={"mok.compiler": _compiler()})
    rank = dist.get_rank(group) if group is not None else 0
    tokens = _sentences(seed + rank)

    report = explain(compiled, tokens)
    print(report)
    if len(report.matches) != 1:
        raise DemoError(f"expected 1 rewritten MoE layer, found {len(report.matches)}")
    print("\nThe graph that is compiled now:\n")
    print(report.graph_after)
    print("\nOutputs and gradients, compiled against eager, in float64:\n")
    compare(eager, compiled, tokens)
    print(f"\n{steps} steps of training, side by side:\n")
    train(eager, compiled, tokens, steps, group)


def compare(eager: nn.Module, compiled: Callable[[Tensor], Tensor], tokens: Tensor) -> None:
    """Print how the output and every parameter's gradient of two models of the same parameters compare.

    Raises:
        DemoError: one differs by more than `TOLERANCE`, or only one of the two has it.
    """
    expected, actual = eager(tokens), compiled(tokens)
    loss(expected, tokens).backward()
    loss(actual, tokens).backward()
    rows: list[tuple[str, Tensor | None, Tensor | None]] = [("output", expected.detach(), actual.detach())]
    for (name, ours), theirs in zip(_parameters(compiled), eager.parameters(), strict=True):
        rows.append((f"grad {name}", theirs.grad, ours.grad))
    print(f"  {'':<34} {'largest value':>14} {'largest difference':>20}")
    wrong = []
    for name, right, found in rows:
        if right is None or found is None:
            wrong.append(name)
            print(f"  {name:<34} {'missing from ' + ('eager' if right is None else 'compiled'):>35}")
            continue
        largest, difference = right.abs().max().item(), (right - found).abs().max().item()
        print(f"  {name:<34} {largest:>14.3e} {difference:>20.1e}")
        if not difference <= TOLERANCE * largest:
            wrong.append(name)
    if wrong:
        raise DemoError(f"compiled differs from eager by more than {TOLERANCE} in: {', '.join(wrong)}")


def train(
    eager: nn.Module,
    compiled: Callable[[Tensor], Tensor],
    tokens: Tensor,
    steps: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Train both from the same weights on the same data and print both losses after each step.

    Raises:
        DemoError: the losses differ by more than `TOLERANCE`, or the loss did not fall.
    """
    models: list[tuple[Callable[[Tensor], Tensor], list[tuple[str, nn.Parameter]]]] = [
        (eager, list(eager.named_parameters())),
        (compiled, list(_parameters(compiled))),
    ]
    optimizers = [torch.optim.AdamW([p for _, p in parameters], lr=3e-3) for _, parameters in models]
    print(f"  {'step':>4} {'eager loss':>14} {'mok loss':>14} {'difference':>12}")
    history: list[list[float]] = []
    for step in range(steps):
        losses = []
        for (model, parameters), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            value = loss(model(tokens), tokens)
            value.backward()
            _average(parameters, group)
            optimizer.step()
            losses.append(_mean(value.detach(), group))
        history.append(losses)
        difference = abs(losses[0] - losses[1])
        print(f"  {step + 1:>4} {losses[0]:>14.10f} {losses[1]:>14.10f} {difference:>12.1e}")
        if not difference <= TOLERANCE * abs(losses[0]):
            raise DemoError(f"the losses differ by {difference:.1e} in step {step + 1}")
    if steps > 1 and not history[-1][1] < history[0][1]:
        raise DemoError(f"the loss did not fall: {history[0][1]:.4f} at first, {history[-1][1]:.4f} at last")


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of guessing each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _model(seed: int, group: dist.ProcessGroup | None) -> nn.Module:
    """Experts differ between ranks, everything else does not."""
    torch.manual_seed(seed)
    model = Block(VOCABULARY, group=group).double()
    if group is not None:
        torch.manual_seed(seed + 1 + dist.get_rank(group))
        for name, parameter in model.named_parameters():
            if _is_expert(name):
                nn.init.normal_(parameter, std=0.1)
            else:
                dist.broadcast(parameter.data, src=0, group=group)
    return model


def _sentences(seed: int) -> Tensor:
    """Token ids [B, S]: each token is followed by one and the same, but for every tenth or so."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    regular = torch.rand(BATCH, SEQUENCE, generator=generator) < 0.9
    for i in range(1, SEQUENCE):
        tokens[:, i] = torch.where(regular[:, i], following[tokens[:, i - 1]], tokens[:, i])
    return tokens


def _average(parameters: list[tuple[str, nn.Parameter]], group: dist.ProcessGroup | None) -> None:
    """Make gradients those of all ranks' mean loss. An expert's already holds what all ranks sent to it."""
    if group is None:
        return
    for name, parameter in parameters:
        assert parameter.grad is not None
        if not _is_expert(name):
            dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def _mean(value: Tensor, group: dist.ProcessGroup | None) -> float:
    if group is not None:
        dist.all_reduce(value, group=group)
        value /= dist.get_world_size(group)
    return value.item()


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _parameters(compiled: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, nn.Parameter]]:
    """Of the model behind a compiled module, under the names that it gives them."""
    assert isinstance(compiled, nn.Module)
    for name, parameter in compiled.named_parameters():
        yield name.removeprefix("_orig_mod."), parameter


def _compiler() -> str:
    """Inductor, unless there is no C++ compiler for it to call; the op is the same without it."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        print("(Inductor finds no C++ compiler: the rest of the graph runs uncompiled)\n")
        return "aot_eager"
    return "inductor"
