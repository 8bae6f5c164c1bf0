"""Words for a match: how the layer was written, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from mokfx.passes.interpret import Tracker
from mokfx.passes.layer import Layer
from mokfx.passes.outcome import Match
from mokfx.passes.region import Region
from mokfx.passes.source import source_of
from mokfx.passes.value import Leaf, Value

FIRST_MATCH = {
    "dispatch": (
        ("aten.sort", "sorted by expert"),
        ("aten.nonzero", "searched expert by expert"),
        ("aten.cumsum", "one-hot places"),
        ("aten.index", "a row for each choice"),
    ),
    "products": (
        ("aten._grouped_mm", "grouped_mm"),
        ("aten.bmm", "batched products"),
        ("aten.mm", "a product for each expert"),
        ("aten.addmm", "a product for each expert"),
    ),
    "combine": (
        ("aten.index_add", "index_add"),
        ("aten.scatter_add", "scatter_add"),
        ("aten.index_put", "written back by index, summed over the choices"),
        ("aten.sum", "put back in order, summed over the choices"),
        ("aten.bmm", "put back in order, a product over the choices"),
        ("aten.add", "added up choice by choice"),
    ),
}
"""Stage -> the ATen ops that tell how it was written, the first one present deciding."""


def describe_match(region: Region, node: Node, tracker: Tracker) -> Match:
    """The report's entry for a layer that was rewritten."""
    layer = region.found.layer
    source = source_of(region.found.node)
    erased = set(region.erased)
    calls = [name for n, name in tracker.calls if n in erased]
    shape = layer.x.leaves[0].tensor.shape[:-1]
    return Match(
        where=source.where,
        code=source.code,
        node=node.name,
        group=layer.group,
        ranks=layer.ranks,
        tokens=" * ".join(str(s) for s in shape),
        hidden=str(layer.hidden),
        intermediate=str(layer.intermediate),
        num_experts=str(layer.num_experts),
        top_k=str(layer.top_k),
        router=router_words(layer),
        dispatch=_dispatch(layer, calls),
        experts=_experts(layer, calls),
        combine=_combine(layer, calls),
        shared=_shared(layer),
        capacity=""
        if layer.capacity is None
        else f"{layer.capacity.limit} rows an expert, {layer.capacity.order} order",
        kept=tuple(n.name for n in region.kept),
        erased=len(region.erased),
    )


def _first(stage: str, calls: list[str], default: str) -> str:
    return next((words for name, words in FIRST_MATCH[stage] if name in calls), default)


def _dispatch(layer: Layer, calls: list[str]) -> str:
    words = _first("dispatch", calls, "indexed")
    return words if layer.group is None else f"{words}, all-to-all over group {layer.group!r} ({layer.ranks} ranks)"


def _experts(layer: Layer, calls: list[str]) -> str:
    network = layer.network
    words = [network.activation, _first("products", calls, "products")]
    if network.gate is not None:
        fused = {"apart": "gate and up apart", "interleaved": "gate and up interleaved"}
        words.append(fused.get(network.layout, "gate and up fused"))
    if network.gate_bias or network.up_bias or network.down_bias:
        words.append("biases")
    return ", ".join(words)


def _combine(layer: Layer, calls: list[str]) -> str:
    weight = "no router weight" if layer.weights is None else f"router weight on the {layer.weight_on}"
    return f"{_first('combine', calls, 'summed')}, {weight}"


def _shared(layer: Layer) -> str:
    if layer.shared is None:
        return ""
    width = layer.shared.down.inputs
    size = "1" if width is None or width.op != "var" else str(width.args[1])
    return f"{layer.shared.activation}, width {size}" + (", sigmoid gate" if layer.shared_gate is not None else "")


# -- the router ----------------------------------------------------------------------------------------------------

STEPS = {
    "aten.mm": "linear",
    "aten.addmm": "linear with bias",
    "aten._softmax": "softmax",
    "aten.softmax": "softmax",
    "aten.sigmoid": "sigmoid",
    "aten.topk": "top-k",
    "aten.max": "top-1",
    "aten.argmax": "top-1",
    "aten.gather": "gathered",
    "aten.div": "renormalised",
    "aten.mul": "scaled",
}


def router_words(layer: Layer) -> str:
    """The steps from the tokens to the router weights, then what is special about the choice of the experts."""
    ids = list(_history(layer.ids.leaves[0]))
    weights = [] if layer.weights is None else list(_history(layer.weights.leaves[0]))
    if not any(step in ("aten.topk", "aten.max", "aten.argmax") for step in ids):
        return "ids that are data"
    path = _to_logits(weights if len(weights) > 1 else ids)
    steps = [STEPS[name] for name in reversed(path) if name in STEPS]
    if layer.weights is not None and layer.weights.scale != 1.0:
        steps.append("scaled")
    words = " -> ".join(dict.fromkeys(steps)).replace("top-k", f"top-{layer.top_k}")
    chosen = ids[: ids.index("aten.mm")] if "aten.mm" in ids else ids
    extras = [
        text
        for name, text in (("aten.add", "bias-corrected choice"), ("aten.masked_fill", "group-limited choice"))
        if name in chosen and name not in weights
    ]
    return ", ".join([words, *extras]) if words else "ids that are data"


def _to_logits(history: list[str]) -> list[str]:
    """The part of a history up to the router's own product."""
    products = [i for i, name in enumerate(history) if name in ("aten.mm", "aten.addmm")]
    return history[: products[0] + 1] if products else history


def _history(leaf: Leaf) -> Iterator[str]:
    """The ops behind a tensor, latest first, along the first input of each."""
    current: Leaf | None = leaf
    for _ in range(24):
        if current is None or not current.made_by:
            return
        yield current.made_by
        current = _first_leaf(current.inputs)


def _first_leaf(inputs: tuple[object, ...]) -> Leaf | None:
    for value in inputs:
        if isinstance(value, Value):
            term = value.body
            while term.op in ("cast", "detached"):
                term = term.args[0]
            if term.op == "at" and isinstance(term.args[0], Leaf):
                return term.args[0]
    return None
