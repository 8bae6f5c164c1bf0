"""Faults planted in a composed layer: each makes another function of it, or only seems to.

`FAULTS` holds them by name. A faulty layer is judged against itself in eager: a bug stays the user's bug.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from . import bent
from .exchange import IDS_SENT
from .layer import MoE
from .spelling import Spelling


@dataclass(frozen=True)
class Fault:
    name: str
    expectation: Literal["refused", "equal"]
    """refused: no MoE op can say this. equal: one can, so whoever matches it must get the same numbers."""
    wrong: str
    """One line: what differs from the layer as spelled."""
    plant: Callable[[MoE], None]
    """Changes the layer in place."""
    fits: Callable[[Spelling], bool]
    """Whether the fault has an effect on a layer with this spelling."""
    random: bool = False
    """Two runs differ, so there are no numbers to compare."""
    forward_only: bool = False
    """Eager cannot differentiate the faulty layer either."""


FAULTS: dict[str, Fault] = {}


def by_sorting(s: Spelling) -> bool:
    return not s.whole


def at_home(s: Spelling) -> bool:
    return not s.whole and not s.exchange


def sorting_blindly(s: Spelling) -> bool:
    """By sorting, and the receiver does not look at ids that a fault makes wrong for it."""
    return not s.whole and s.regroup not in IDS_SENT


def anywhere(s: Spelling) -> bool:
    return True


def exchanging(s: Spelling) -> bool:
    return bool(s.exchange)


def fault(
    expectation: Literal["refused", "equal"], wrong: str, fits: Callable[[Spelling], bool], **more: bool
) -> Callable[[Callable[[MoE], None]], Callable[[MoE], None]]:
    def add(plant: Callable[[MoE], None]) -> Callable[[MoE], None]:
        FAULTS[plant.__name__] = Fault(plant.__name__, expectation, wrong, plant, fits, **more)
        return plant

    return add


# --- the expert's network ---


@fault("refused", "the hidden passes a tanh", anywhere)
def tanh_hidden(layer: MoE) -> None:
    layer.ffn.hidden_tap = torch.tanh


@fault("refused", "the hidden is normalised", anywhere)
def layer_norm_hidden(layer: MoE) -> None:
    layer.ffn.hidden_tap = lambda h: F.layer_norm(h, h.shape[-1:])


@fault("refused", "the expert has three layers", anywhere)
def third_layer(layer: MoE) -> None:
    inner = layer.sizes.intermediate
    layer.middle = nn.Parameter(
        torch.linspace(-1, 1, inner * inner, dtype=layer.dtype).view(inner, inner) / inner
    )
    layer.ffn.hidden_tap = lambda h: F.relu(h @ layer.get_parameter("middle"))


@fault("refused", "dropout inside the expert", anywhere, random=True)
def dropout(layer: MoE) -> None:
    layer.ffn.hidden_tap = lambda h: F.dropout(h, 0.5, training=True)


@fault("refused", "noise inside the expert", anywhere, random=True)
def noise(layer: MoE) -> None:
    layer.ffn.hidden_tap = lambda h: h + 0.1 * torch.randn_like(h)


@fault("refused", "the hidden is clipped", anywhere)
def clipped_hidden(layer: MoE) -> None:
    layer.ffn.hidden_tap = lambda h: h.clamp(-0.1, 0.1)


@fault("refused", "the expert adds its input to its output", by_sorting)
def residual_expert(layer: MoE) -> None:
    layer.taps["out"] = lambda m, out, rows, counts: out + rows


@fault("equal", "every expert's output has its own scale", by_sorting)
def scaled_experts(layer: MoE) -> None:
    scale = torch.linspace(1, 2, layer.ffn.count, dtype=layer.dtype)
    layer.register_buffer("scale", scale)

    def tap(m: MoE, out: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        return out * m.get_buffer("scale").repeat_interleave(counts, output_size=out.shape[0]).unsqueeze(1)

    layer.taps["out"] = tap


@fault("equal", "every expert uses its neighbour's weights", by_sorting)
def neighbours_weights(layer: MoE) -> None:
    """Legal: the weights are just other tensors, and a rolled stack is a stack."""
    layer.ffn.shift = 1


# --- the order of slots ---


@fault("refused", "the outputs are gathered by the order, not by its inverse", by_sorting)
def order_for_inverse(layer: MoE) -> None:
    layer.taps["back_order"] = lambda m, order: torch.argsort(order)


@fault("refused", "the outputs go back by another sort's order", by_sorting)
def other_order(layer: MoE) -> None:
    layer.taps["back_order"] = lambda m, order: order.flip(0)


@fault("refused", "the outputs go back shifted by one", by_sorting)
def shifted_order(layer: MoE) -> None:
    layer.taps["back_order"] = lambda m, order: order.roll(1)


@fault("refused", "slots are sorted by weight, not by expert", sorting_blindly)
def sorted_by_weight(layer: MoE) -> None:
    layer.taps["order"] = lambda m, order, flat, routed: routed.weights.reshape(-1).argsort()


@fault("refused", "slots are sorted from the last expert to the first", sorting_blindly)
def sorted_descending(layer: MoE) -> None:
    layer.taps["order"] = lambda m, order, flat, routed: flat.argsort(descending=True)


@fault("refused", "slots are not sorted at all", sorting_blindly)
def not_sorted(layer: MoE) -> None:
    layer.taps["order"] = lambda m, order, flat, routed: torch.arange(flat.shape[0], device=flat.device)


@fault("refused", "`order % k` for the token of a slot", by_sorting)
def choice_for_token(layer: MoE) -> None:
    layer.taps["rows"] = lambda m, rows, x, order: x[order % m.top_k]


@fault("equal", "every row is the next token's", by_sorting)
def next_token(layer: MoE) -> None:
    layer.taps["rows"] = lambda m, rows, x, order: x.roll(1, 0)[order // m.top_k]


@fault("refused", "the counts are those of other ids", sorting_blindly)
def other_counts(layer: MoE) -> None:
    layer.taps["counted"] = lambda m, ids: (ids + 1) % m.experts


# --- the weights ---


def _on_weights(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda m, routed: routed._replace(weights=change(routed.weights))


@fault("equal", "each choice has the other's weight", anywhere)
def swapped_weights(layer: MoE) -> None:
    layer.taps["routed"] = _on_weights(lambda w: w.flip(-1))


@fault("equal", "each token has the next one's weights", anywhere)
def shifted_weights(layer: MoE) -> None:
    layer.taps["routed"] = _on_weights(lambda w: w.roll(1, 0))


@fault("equal", "the weights have no gradient", anywhere)
def detached_weights(layer: MoE) -> None:
    layer.taps["routed"] = _on_weights(lambda w: w.detach())


@fault("equal", "small weights are cut to zero", anywhere)
def thresholded_weights(layer: MoE) -> None:
    layer.taps["routed"] = _on_weights(lambda w: torch.where(w > 0.2, w, torch.zeros_like(w)))


@fault("equal", "the weights are applied twice", at_home)
def weights_twice(layer: MoE) -> None:
    def tap(m: MoE, out: Tensor, x: Tensor, order: Tensor, routed: Any) -> Tensor:
        flat = routed.weights.t().reshape(-1) if m.spelling.by_choice else routed.weights.reshape(-1)
        return out * flat[order].unsqueeze(1)

    layer.taps["returned"] = tap


@fault("equal", "each sorted output is weighed as if it were unsorted", at_home)
def unsorted_weights(layer: MoE) -> None:
    def tap(m: MoE, out: Tensor, x: Tensor, order: Tensor, routed: Any) -> Tensor:
        return out * routed.weights.reshape(-1, 1)

    layer.taps["returned"] = tap


# --- gradients ---


@fault("refused", "the rows are detached: x gets no gradient through the experts", by_sorting)
def detached_rows(layer: MoE) -> None:
    layer.taps["rows"] = lambda m, rows, x, order: rows.detach()


@fault("refused", "the tokens are fetched under no_grad", by_sorting)
def rows_without_grad(layer: MoE) -> None:
    def tap(m: MoE, rows: Tensor, x: Tensor, order: Tensor) -> Tensor:
        with torch.no_grad():
            return rows * 1.0

    layer.taps["rows"] = tap


@fault("refused", "the hidden is detached", anywhere)
def detached_hidden(layer: MoE) -> None:
    layer.ffn.hidden_tap = lambda h: h.detach()


@fault("refused", "the outputs of the experts are detached", by_sorting)
def detached_outputs(layer: MoE) -> None:
    layer.taps["out"] = lambda m, out, rows, counts: out.detach()


@fault("refused", "the experts run under no_grad", by_sorting)
def experts_without_grad(layer: MoE) -> None:
    layer.taps["no_grad"] = lambda m, value: value


@fault("refused", "the gradient of the hidden is scaled by an autograd.Function", anywhere)
def scaled_hidden_gradient(layer: MoE) -> None:
    layer.ffn.hidden_tap = ScaledGradient.apply


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


# --- values that leave the region, and things changed in it ---


def _keep(value: Tensor, m: MoE) -> Tensor:
    m.kept = value
    return value


def _return_kept(layer: MoE) -> None:
    layer.taps["result"] = lambda m, result: (
        (*result, m.kept) if isinstance(result, tuple) else (result, m.kept)
    )


@fault("refused", "the model also returns the outputs of the experts", by_sorting)
def returns_outputs(layer: MoE) -> None:
    layer.taps["out"] = lambda m, out, rows, counts: _keep(out, m)
    _return_kept(layer)


@fault("equal", "the model also returns the sorted rows", by_sorting)
def returns_rows(layer: MoE) -> None:
    layer.taps["rows"] = lambda m, rows, x, order: _keep(rows, m)
    _return_kept(layer)


@fault("refused", "the model also returns the hidden of its experts", by_sorting)
def returns_hidden(layer: MoE) -> None:
    layer.ffn.hidden_tap = lambda h: _keep(h, layer)
    _return_kept(layer)


@fault("refused", "the outputs of the experts are also added to a buffer of the model", at_home)
def buffer_of_outputs(layer: MoE) -> None:
    layer.register_buffer("seen", torch.zeros(layer.sizes.hidden, dtype=layer.dtype))

    def tap(m: MoE, out: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        m.get_buffer("seen").add_(out.detach().sum(0))
        return out

    layer.taps["out"] = tap


@fault("equal", "the model counts the tokens of each expert in a buffer", anywhere)
def buffer_of_counts(layer: MoE) -> None:
    """Legal: counts stay available (torchtitan balances its load with them)."""
    layer.register_buffer("load", torch.zeros(layer.experts, dtype=torch.int64))

    def tap(m: MoE, routed: Any) -> Any:
        with torch.no_grad():
            m.get_buffer("load").add_(F.one_hot(routed.ids.reshape(-1), m.experts).sum(0))
        return routed

    layer.taps["routed"] = tap


@fault("equal", "the rows are doubled in place", by_sorting)
def rows_in_place(layer: MoE) -> None:
    layer.taps["rows"] = lambda m, rows, x, order: rows.mul_(2)


@fault("refused", "the tokens are changed in place after they were sent", by_sorting, forward_only=True)
def tokens_in_place(layer: MoE) -> None:
    def tap(m: MoE, rows: Tensor, x: Tensor, order: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(0.5)
        return rows

    layer.taps["rows"] = tap


# --- the exchange ---


def _form(name: str, wrong: str, form: Any, fits: Callable[[Spelling], bool]) -> None:
    def plant(layer: MoE) -> None:
        layer.form = form

    def plant_back(layer: MoE) -> None:
        layer.form_back = form

    FAULTS[name] = Fault(name, "refused", f"on the way out, {wrong}", plant, fits)
    FAULTS[f"{name}_back"] = Fault(
        f"{name}_back", "refused", f"on the way back, {wrong}", plant_back, lambda s: fits(s) and not s.whole
    )


_form("gradient_scaled", "the exchange's gradient is doubled", bent.scaled, exchanging)
_form("gradient_flipped", "the exchange's gradient is in another order", bent.flipped, exchanging)
_form("gradient_zero", "the exchange's gradient is zero", bent.zeros, exchanging)
_form("exchange_detached", "the exchange is detached", bent.detached, exchanging)
_form("exchange_without_grad", "the exchange is under no_grad", bent.under_no_grad, exchanging)


@fault("refused", "the exchange's gradient stays where it is", lambda s: bool(s.exchange and s.whole))
def gradient_identity(layer: MoE) -> None:
    layer.form = bent.identity


@fault("refused", "another group on the way back", lambda s: bool(s.exchange and not s.whole))
def two_groups(layer: MoE) -> None:
    """The same ranks in another group: nobody looks into a group to see that."""
    layer.group_back = dist.new_group(list(range(layer.ranks)))


@fault("refused", "each rank gets the next rank's rows", lambda s: bool(s.exchange and s.whole))
def rolled_exchange(layer: MoE) -> None:
    right = layer.form
    layer.form = lambda x, out_splits, in_splits, group: right(x.roll(1, 0), out_splits, in_splits, group)


def plant(fault: Fault, layer: MoE) -> MoE:
    """The layer with the fault in it.

    Raises:
        ValueError: the fault has no effect on this spelling.
    """
    if not fault.fits(layer.spelling):
        raise ValueError(f"{fault.name} has no effect on {layer.spelling.id}")
    fault.plant(layer)
    return layer
