"""The pass: find each MoE layer of a captured graph and its nested graphs, and put one op call in its place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

import mokfx.ops
from mokfx.passes.describe import describe_match
from mokfx.passes.emit import Emitter
from mokfx.passes.facts import shape_of
from mokfx.passes.interpret import GraphRun, Tracker
from mokfx.passes.misses import Reason, near_misses
from mokfx.passes.outcome import Match, Miss, Outcome
from mokfx.passes.reading import Reading, Watch
from mokfx.passes.region import Dependencies, NotLegal, Region, erase, region_of
from mokfx.passes.source import source_of

log = logging.getLogger(__name__)

ProviderCheck = Callable[..., str | None]


def rewrite(module: GraphModule, provider_check: ProviderCheck | None = None, watch: Watch | None = None) -> Outcome:
    """Rewrite a Dynamo graph in place, and the graphs nested in it.

    Args:
        module: what a backend is given; its nodes carry `example_value`.
        provider_check: called with the op's arguments (fake tensors) by keyword `args` and `kwargs`; says why no
            provider can run the call, or None.
        watch: called for each graph that was read, with how it was understood.
    """
    begin = time.perf_counter()
    matches: list[Match] = []
    misses: list[Miss] = []
    for graph_module in graphs_in(module):
        found, missed = _rewrite_one(graph_module, provider_check, watch)
        matches += found
        misses += missed
    return Outcome(tuple(matches), tuple(misses), time.perf_counter() - begin)


def graphs_in(module: GraphModule) -> Iterator[GraphModule]:
    """The graph and the bodies of its checkpoints and nested regions; not those of user autograd functions."""
    private = {
        str(argument.target)
        for node in module.graph.nodes
        if node.op == "call_function" and "autograd_function_apply" in str(node.target)
        for argument in node.args
        if isinstance(argument, Node) and argument.op == "get_attr"
    }
    yield module
    for name, child in module.named_children():
        if isinstance(child, GraphModule) and name not in private:
            yield from graphs_in(child)


ROUTING = frozenset(
    [
        "topk",
        "sort",
        "argsort",
        "argmax",
        "max",
        "nonzero",
        "where",
        "one_hot",
        "eq",
        "bincount",
        "histc",
        "unique",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "index_add",
        "index_add_",
        "index_put",
        "index_put_",
        "gather",
        "take_along_dim",
        "all_to_all_single",
    ]
)
"""What a program calls to choose experts or to send rows to them. A graph with none of it is not read."""


def may_hold_layer(module: GraphModule) -> bool:
    """Whether a graph is worth reading: it has a call that routes, or indexes with a tensor, or may mix experts."""
    calls = [node for node in module.graph.nodes if node.op.startswith("call_")]
    return any(map(_routes, calls)) or _may_mix(module, calls)


def _may_mix(module: GraphModule, calls: Sequence[Node]) -> bool:
    """Whether a softmax may weigh experts: it is a factor, or there are stacked weights or outputs.

    What attention does with its softmax is a matrix product; that alone is not read.
    """
    softmaxes = [node for node in calls if _name(node) == "softmax"]
    if not softmaxes:
        return False
    weights = [n.meta.get("example_value") for n in module.graph.nodes if n.op == "placeholder"]
    stacked = any(isinstance(w, torch.nn.Parameter) and w.dim() == 3 and w.shape[0] > 1 for w in weights)
    return stacked or any(_name(node) == "stack" for node in calls) or any(map(_weighs, softmaxes))


MOVED = frozenset(("getitem", "unsqueeze", "select", "unbind", "chunk", "split", "to", "float", "div", "truediv"))


def _weighs(node: Node) -> bool:
    """Whether a tensor, or a part of it, is a factor."""
    users = list(node.users)
    return any(_name(user) in ("mul", "mul_") or (_name(user) in MOVED and _weighs(user)) for user in users)


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _routes(node: Node) -> bool:
    name = _name(node)
    if name == "getitem":
        index = node.args[1]
        return any(isinstance(i, Node) for i in (index if isinstance(index, tuple) else (index,)))
    return name.split(".")[0] in ROUTING or "grouped_mm" in name


def _rewrite_one(
    module: GraphModule, provider_check: ProviderCheck | None, watch: Watch | None
) -> tuple[list[Match], list[Miss]]:
    placeholders = [n.meta.get("example_value") for n in module.graph.nodes if n.op == "placeholder"]
    fake_mode = _fake_mode(placeholders)
    if fake_mode is None or any(value is None for value in placeholders) or not may_hold_layer(module):
        return [], []
    tracker = Tracker(gradients=torch.is_grad_enabled())
    run = GraphRun(module, tracker)
    try:
        with running(fake_mode, tracker):
            run.run(*placeholders)
    except Exception as error:
        return [], [_unreadable(tracker, error)]
    finally:
        run.leave()
    layers: list[tuple[Region, Match]] = []
    refused: list[tuple[Reason, set[object]]] = []
    covered: set[Node] = set()
    needs = captured = Dependencies(module.graph, run, tracker)
    for found in reversed(tracker.found):
        if found.node in covered:
            continue
        try:
            region = region_of(found, module.graph, run, tracker, needs)
            node = _replace(module, region, run, fake_mode, provider_check)
        except NotLegal as why:
            refused.append((Reason(why.node, why.reason), set(found.layer.ids.leaves)))
            continue
        covered |= set(region.erased)
        layers.insert(0, (region, describe_match(region, node, tracker)))
        erase(module.graph, region)
        needs = Dependencies(module.graph, run, tracker)
    if layers:
        module.delete_all_unused_submodules()  # the bodies of functions that are gone
        module.graph.lint()
        module.recompile()
    misses = near_misses(tracker, refused, covered)
    if watch is not None:
        watch(Reading(module, captured.of, run.env, tracker, tuple(layers), tuple(misses)))
    return [match for _, match in layers], misses


def _unreadable(tracker: Tracker, error: Exception) -> Miss:
    """A graph that cannot be run on its fake tensors is left alone; the model runs as it would without the pass."""
    log.warning("mokfx could not read a graph, which stays as it was", exc_info=error)
    source = source_of(tracker.node)
    what = str(error).strip().split("\n")[0] or type(error).__name__
    reason = f"the graph cannot be read beyond this line: {type(error).__name__}: {what}"
    return Miss(reason, source.where, source.code, tracker.node.name)


@contextmanager
def running(fake_mode: FakeTensorMode, tracker: Tracker) -> Iterator[None]:
    """Run on fake tensors without leaving a trace: no guards, no new data-dependent sizes, no changed modes."""
    shape_env = fake_mode.shape_env
    grad, cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # it would hand on casts that Dynamo made, which nobody here has seen
    try:
        if shape_env is None:
            with fake_mode, tracker:
                yield
        else:
            with shape_env.suppress_guards(), shape_env.ignore_fresh_unbacked_symbols(), fake_mode, tracker:
                yield
    finally:
        torch._C._set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cached)


def _fake_mode(values: list[object]) -> FakeTensorMode | None:
    for value in values:
        if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
            mode: FakeTensorMode = value.fake_mode
            return mode
    return None


def _replace(
    module: GraphModule,
    region: Region,
    run: GraphRun,
    fake_mode: FakeTensorMode,
    provider_check: ProviderCheck | None,
) -> Node:
    """Insert the call and let the users of the layer's output use it; undone if anything disagrees."""
    emitter = Emitter(module.graph, region, run.env)
    tensor = region.found.tensor
    node: Node | None = None
    try:
        with fake_mode, torch.no_grad(), _quiet(fake_mode):
            node = emitter.emit()
        _check_same(node, tensor, region)
        call = next(n for n in emitter.values if n.target is torch.ops.mok.moe.default)
        reason = None if provider_check is None else provider_check(call)
        if reason is not None:
            raise NotLegal(reason, region.found.node)
    except Exception as error:
        for made in reversed(list(emitter.values)):
            module.graph.erase_node(made)
        if isinstance(error, NotLegal):
            raise
        raise NotLegal(f"the op does not take this layer: {error}", region.found.node) from error
    made_nodes = set(emitter.values)
    order = {n: i for i, n in enumerate(module.graph.nodes)}
    for alias in region.aliases:
        alias.replace_all_uses_with(
            node, delete_user_cb=lambda user: user not in made_nodes and order[user] > order[node]
        )
    run.env |= emitter.values
    return call


@contextmanager
def _quiet(fake_mode: FakeTensorMode) -> Iterator[None]:
    if fake_mode.shape_env is None:
        yield
    else:
        with fake_mode.shape_env.suppress_guards():
            yield


def _check_same(node: Node, tensor: torch.Tensor, region: Region) -> None:
    """The op's output must look like what it replaces."""
    value = node.meta["example_value"]
    for name, got, want in (
        ("dtype", value.dtype, tensor.dtype),
        ("device", value.device, tensor.device),
        ("shape", shape_of(value), region.found.shape),
    ):
        if got != want:
            raise NotLegal(f"the op's output has {name} {got}, the layer's has {want}", region.found.node)
    if value.is_contiguous() != tensor.is_contiguous():
        raise NotLegal("the layer's output is not contiguous, the op's is", region.found.node)


assert mokfx.ops
