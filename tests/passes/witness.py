"""Run a captured graph on fake tensors with facts and, at once, on numbers: the facts must hold of those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from mokfx.passes.bijections import Sort
from mokfx.passes.facts import storage_of
from mokfx.passes.interpret import GraphRun, Tracker
from mokfx.passes.rewrite import _fake_mode, running
from mokfx.passes.value import Leaf, Value

from .evaluate import Evaluator, elements
from .support import FLAGS


class Witness(Tracker):
    """A tracker that also runs every call on real tensors."""

    def __init__(self) -> None:
        super().__init__(gradients=False)
        self.real: dict[int, Tensor] = {}
        self.aliases: dict[int, list[Tensor]] = {}
        self.history: dict[tuple[int, int], Tensor] = {}
        """What a tensor held after each of its changes."""
        self.symbols: dict[sympy.Expr, int] = {}
        self.orders: dict[Sort, tuple[list[int], list[int]]] = {}
        self.facts.rename_size = self.rename_size  # type: ignore[method-assign]

    def number(self, size: Any) -> int:
        """A size or number of the program as it is in this run."""
        size = getattr(getattr(size, "node", None), "expr", size)
        return int(size) if isinstance(size, int) else int(sympy.sympify(size).subs(self.symbols))

    def rename_size(self, old: Any, new: Any) -> None:
        if isinstance(new, sympy.Expr):
            self.symbols[new] = self.number(old)
        type(self.facts).rename_size(self.facts, old, new)

    def pair(self, fake: Any, real: Any) -> None:
        """Learn that `real` is what `fake` stands for."""
        if isinstance(fake, Tensor):
            self.real[id(fake)] = real
            self.aliases.setdefault(storage_of(fake), []).append(fake)
            self.remember(fake)
            for a, b in zip(fake.shape, real.shape, strict=True):
                self.pair(a, b)
            self.pair(fake.storage_offset(), real.storage_offset())
        elif isinstance(fake, torch.SymInt) and isinstance(fake.node.expr, sympy.Symbol):
            self.symbols[fake.node.expr] = int(real)

    def remember(self, fake: Tensor) -> None:
        with unset_fake_temporarily(), torch.no_grad():
            self.history[id(fake), self.facts.version(fake)] = self.real[id(fake)].detach().clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given = tree_map(self.realised, (tuple(args), kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        with unset_fake_temporarily(), torch.no_grad():
            results = func(*given[0], **given[1])
            if "empty" in func._schema.name:
                results.zero_()  # memory that nothing wrote counts as zero
        for fake, real in zip(tree_leaves(out), tree_leaves(results), strict=True):
            self.pair(fake, real)
        for fake in tree_leaves((args, kwargs)):
            if isinstance(fake, FakeTensor) and func._schema.is_mutable:
                for alias in self.aliases[storage_of(fake)]:
                    self.remember(alias)
        if func._schema.name == "aten::sort":
            self.learn_order(out[1], results[1])
        return out

    def learn_order(self, fake: Tensor, real: Tensor) -> None:
        """What an unstable sort did with equal keys, only it knows."""
        value = self.facts.get(fake)
        if value is None or value.body.op != "perm":
            return
        sort, inverse, _ = value.body.args
        if sort.tie is not None and not inverse:
            with unset_fake_temporarily():
                order = real.tolist()
            self.orders[sort] = order, sorted(range(len(order)), key=order.__getitem__)

    def realised(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.real.get(id(argument), argument)
        return self.number(argument) if isinstance(argument, torch.SymInt) else argument

    def recorded(self, tensor: Tensor, known: Tensor) -> Tensor:
        result = super().recorded(tensor, known)
        if result is not tensor:
            self.pair(known, self.real[id(tensor)])
        return result

    def read(self, leaf: Leaf) -> Tensor:
        return self.history[id(leaf.tensor), leaf.version]


def witnessed(module: GraphModule, inputs: Sequence[Tensor]) -> tuple[Witness, dict[Node, Any]]:
    """Run a graph on its placeholders' fake tensors and on `inputs`: the tracker, and each node's value."""
    placeholders = [n.meta["example_value"] for n in module.graph.nodes if n.op == "placeholder"]
    witness = Witness()
    for fake, real in zip(placeholders, inputs, strict=True):
        witness.pair(fake, real.detach().clone())
    run = GraphRun(module, witness)
    mode = _fake_mode(placeholders)
    assert mode is not None
    with running(mode, witness):
        run.run(*placeholders)
    return witness, run.env


def untrue(witness: Witness, env: dict[Node, Any]) -> tuple[list[str], int]:
    """The nodes whose facts do not hold, and how many facts were compared."""
    evaluate = Evaluator(witness.number, witness.read)
    evaluate.orders |= witness.orders
    wrong: list[str] = []
    compared = 0
    for node, fake in env.items():
        value = witness.facts.get(fake) if isinstance(fake, Tensor) else None
        if value is None:
            continue
        compared += 1
        if not _holds(value, witness.real[id(fake)], evaluate):
            wrong.append(f"{node.name}: {value}")
        leaf = value.body.args[0] if value.body.op == "at" else None
        if isinstance(leaf, Leaf):
            wrong += [f"{node.name} {claim}" for claim in _false_claims(leaf, evaluate)]
    return wrong, compared


def assert_facts(function: Any, *inputs: Any) -> int:
    """Every fact about a captured function holds when it runs on `inputs`; how many there were."""
    results: list[tuple[list[str], int]] = []

    def backend(module: GraphModule, examples: Sequence[Any]) -> Any:
        def run(*arguments: Tensor) -> Any:
            results.append(untrue(*witnessed(module, arguments)))
            return module.forward(*arguments)

        return run

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**FLAGS):
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    ((wrong, compared),) = results
    assert not wrong, "\n".join(wrong)
    return compared


def _false_claims(leaf: Leaf, evaluate: Evaluator) -> list[str]:
    real, claims = evaluate.read(leaf), []
    if leaf.definition is not None and not _holds(leaf.definition, real, evaluate):
        claims.append(f"is not {leaf.definition}")
    if leaf.bound is not None and bool(((real < 0) | (real >= evaluate.size(leaf.bound))).any()):
        claims.append(f"is not within {leaf.bound}")
    if leaf.distinct and any(len(set(row.tolist())) < len(row) for row in real.reshape(-1, real.shape[-1])):
        claims.append("is not distinct in each row")
    return claims


def _holds(value: Value, real: Tensor, evaluate: Evaluator) -> bool:
    claimed = elements(value, evaluate)
    real = real.detach().double()
    if claimed.shape != real.shape:
        return False
    return bool((claimed.isnan() | torch.isclose(claimed, real, rtol=1e-9, atol=1e-9)).all())
