"""What must be left alone is, and says why: the reason, the line where understanding ended, and its source."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import torch
from expecttest import TestCase
from torch import nn

from mokfx.passes import Outcome

from ..spellings.faults import FAULTS, plant
from ..spellings.layer import build
from ..spellings.spelling import Sizes, Spelling
from ..spellings.strangers import STRANGERS
from .composed import fake_group, outcome_of

HOME = Spelling(products="padded_bmm", sort="argsort_stable")
LOOPED = Spelling(storage="out_in", sort="argsort_stable", reduce="index_add_")
SENT = Spelling(exchange="functional", products="padded_bmm", sort="argsort_stable")
BUCKETS = Spelling(whole="einsum_gshard", products="padded_bmm", exchange="functional")
REFUSED = [fault for fault in FAULTS.values() if fault.expectation == "refused"]


def text_of(outcome: Outcome) -> str:
    """Each miss: its reason, and the line below."""
    assert not outcome.matches
    assert outcome.misses
    rows: list[str] = []
    for miss in outcome.misses:
        file, line = miss.where.split(":")
        assert int(line) > 0
        rows += textwrap.wrap(miss.reason, 100)
        rows += textwrap.wrap(f"{file}: {miss.code}", 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(rows)


def said(layer: nn.Module, *inputs: Any) -> str:
    return text_of(outcome_of(layer, *inputs).outcome)


def table(spelling: Spelling, fits: Callable[[str], bool]) -> str:
    """The text for each fault that is refused and fits the spelling."""
    rows: list[str] = []
    with fake_group() as group:
        for fault in REFUSED:
            if fault.fits(spelling) and fits(fault.name):
                layer = plant(fault, build(spelling, group=group))
                try:
                    rows.append(f"{fault.name} ({fault.wrong}):\n{said(layer, *layer.example())}")
                except AssertionError as error:
                    error.add_note(fault.name)
                    raise
    return "\n\n".join(rows)


class Refusals(TestCase):
    maxDiff = None

    def test_one_rank(self) -> None:
        self.assertExpectedInline(
            table(HOME, lambda name: True),
            """\
tanh_hidden (the hidden passes a tanh):
the expert computes `tanh(silu(a matrix product) * a matrix product)` between its projections, which
is none of the activations
    experts.py: h = self.hidden_tap(h)

layer_norm_hidden (the hidden is normalised):
an expert normalises its values, which is no part of the networks that the op computes
    faults.py: layer.ffn.hidden_tap = lambda h: F.layer_norm(h, h.shape[-1:])

third_layer (the expert has three layers):
an expert has more than two projections: `silu(a matrix product)` is projected again
    combine.py: return (slots * weights.unsqueeze(-1)).sum(dim=1)

dropout (dropout inside the expert):
an expert drops values at random, which the op does not do
    faults.py: layer.ffn.hidden_tap = lambda h: F.dropout(h, 0.5, training=True)

noise (noise inside the expert):
no rule says what `randn_like` makes of rows that were routed to experts
    faults.py: layer.ffn.hidden_tap = lambda h: h + 0.1 * torch.randn_like(h)

clipped_hidden (the hidden is clipped):
the expert computes `clamp(silu(a matrix product) * a matrix product, -0.1, 0.1)` between its
projections, which is none of the activations
    faults.py: layer.ffn.hidden_tap = lambda h: h.clamp(-0.1, 0.1)

residual_expert (the expert adds its input to its output):
`l_x_` is added where only an expert's bias may be
    faults.py: layer.taps["out"] = lambda m, out, rows, counts: out + rows

order_for_inverse (the outputs are gathered by the order, not by its inverse):
the rows do not come back in the order in which they left: the order `order` is not undone by its
own inverse
    combine.py: return out[order.argsort()]

other_order (the outputs go back by another sort's order):
the rows do not come back in the order in which they left: the order `argsort_1`, the order `order`
are not all undone by their own inverses
    combine.py: return out[order.argsort()]

shifted_order (the outputs go back shifted by one):
the rows do not come back in the order in which they left: the order `argsort_1`, the order `order`
are not all undone by their own inverses
    combine.py: return out[order.argsort()]

sorted_by_weight (slots are sorted by weight, not by expert):
a weight is read for another expert than its row's
    experts.py: return m.network(padded, _batched(m, product), weight)[expert, place]

sorted_descending (slots are sorted from the last expert to the first):
a weight is read for another expert than its row's
    experts.py: return m.network(padded, _batched(m, product), weight)[expert, place]

not_sorted (slots are not sorted at all):
the rows do not come back in the order in which they left: the order `argsort_1` is not undone by
its own inverse
    combine.py: return out[order.argsort()]

choice_for_token (`order % k` for the token of a slot):
an expert reads `l_x_` at another position than its row's token
    combine.py: return (slots * weights.unsqueeze(-1)).sum(dim=1)

other_counts (the counts are those of other ids):
rows are written here at places that do not follow from the ids that sorted them
    experts.py: padded[expert, place] = rows

detached_rows (the rows are detached: x gets no gradient through the experts):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    faults.py: layer.taps["rows"] = lambda m, rows, x, order: rows.detach()

rows_without_grad (the tokens are fetched under no_grad):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    faults.py: return rows * 1.0

detached_hidden (the hidden is detached):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    faults.py: layer.ffn.hidden_tap = lambda h: h.detach()

detached_outputs (the outputs of the experts are detached):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    faults.py: layer.taps["out"] = lambda m, out, rows, counts: out.detach()

experts_without_grad (the experts run under no_grad):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    experts.py: return m.network(padded, _batched(m, product), weight)[expert, place]

scaled_hidden_gradient (the gradient of the hidden is scaled by an autograd.Function):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    experts.py: h = self.hidden_tap(h)

returns_outputs (the model also returns the outputs of the experts):
`out_3`, made inside the layer, is used outside of it (by `output`)
    experts.py: return m.network(padded, _batched(m, product), weight)[expert, place]

returns_hidden (the model also returns the hidden of its experts):
`h`, made inside the layer, is used outside of it (by `output`)
    networks.py: "silu_mul": ("swiglu", lambda g, u: F.silu(g) * u),

buffer_of_outputs (the outputs of the experts are also added to a buffer of the model):
`out_3`, made inside the layer, is used outside of it (by `detach`)
    faults.py: m.get_buffer("seen").add_(out.detach().sum(0))

tokens_in_place (the tokens are changed in place after they were sent):
`l_x_`, which the layer reads, is changed in place after that
    faults.py: x.mul_(0.5)""",
        )

    def test_a_loop_over_experts(self) -> None:
        names = ("tanh_hidden", "noise", "other_order", "detached_hidden", "returns_outputs")
        self.assertExpectedInline(
            table(LOOPED, lambda name: name in names),
            """\
tanh_hidden (the hidden passes a tanh):
the expert computes `tanh(silu(a matrix product) * a matrix product)` between its projections, which
is none of the activations
    experts.py: h = self.hidden_tap(h)

noise (noise inside the expert):
no rule says what `randn_like` makes of rows that were routed to experts
    faults.py: layer.ffn.hidden_tap = lambda h: h + 0.1 * torch.randn_like(h)

other_order (the outputs go back by another sort's order):
the rows do not come back in the order in which they left: the order `order` is not undone by its
own inverse
    combine.py: out = (out * flat[order].unsqueeze(-1)).to(out.dtype)

detached_hidden (the hidden is detached):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    faults.py: layer.ffn.hidden_tap = lambda h: h.detach()

returns_outputs (the model also returns the outputs of the experts):
`out`, made inside the layer, is used outside of it (by `output`)
    experts.py: return torch.cat(outs, dim=0)""",
        )

    def test_an_exchange(self) -> None:
        own = {f.name for f in REFUSED if f.fits(SENT) and not f.fits(HOME)}
        self.assertExpectedInline(
            table(SENT, lambda name: name in own),
            """\
gradient_scaled (on the way out, the exchange's gradient is doubled):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

gradient_scaled_back (on the way back, the exchange's gradient is doubled):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

gradient_flipped (on the way out, the exchange's gradient is in another order):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

gradient_flipped_back (on the way back, the exchange's gradient is in another order):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

gradient_zero (on the way out, the exchange's gradient is zero):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

gradient_zero_back (on the way back, the exchange's gradient is zero):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

exchange_detached (on the way out, the exchange is detached):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    bent.py: return functional(x.detach(), out_splits, in_splits, group)

exchange_detached_back (on the way back, the exchange is detached):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    bent.py: return functional(x.detach(), out_splits, in_splits, group)

exchange_without_grad (on the way out, the exchange is under no_grad):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    collectives.py: return funcol.wait_tensor(funcol.all_to_all_single(x, out_splits, in_splits,
    group))

exchange_without_grad_back (on the way back, the exchange is under no_grad):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    collectives.py: return funcol.wait_tensor(funcol.all_to_all_single(x, out_splits, in_splits,
    group))

two_groups (another group on the way back):
rows leave by the all-to-all over group '0', but come back by one over group '1'
    collectives.py: return funcol.wait_tensor(funcol.all_to_all_single(x, out_splits, in_splits,
    group))""",
        )

    def test_an_exchange_of_buckets(self) -> None:
        own = {f.name for f in REFUSED if f.fits(BUCKETS) and not f.fits(HOME)}
        self.assertExpectedInline(
            table(BUCKETS, lambda name: name in own),
            """\
gradient_scaled (on the way out, the exchange's gradient is doubled):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

gradient_flipped (on the way out, the exchange's gradient is in another order):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

gradient_zero (on the way out, the exchange's gradient is zero):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

exchange_detached (on the way out, the exchange is detached):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    bent.py: return functional(x.detach(), out_splits, in_splits, group)

exchange_without_grad (on the way out, the exchange is under no_grad):
the gradient of the rows is cut here (detach or no_grad), where the op would give one
    capacity.py: combine = torch.zeros(*mask1.shape, capacity, dtype=weights.dtype,
    device=ids.device)

gradient_identity (the exchange's gradient stays where it is):
an autograd.Function on the rows is not part of a layer: its backward does not move the gradient
back the way that its forward moved the rows
    bent.py: return Bent.apply(x, out_splits, in_splits, group)

rolled_exchange (each rank gets the next rank's rows):
no rule says what `roll` makes of rows that were routed to experts
    faults.py: layer.form = lambda x, out_splits, in_splits, group: right(x.roll(1, 0), out_splits,
    in_splits, group)""",
        )

    def test_strangers(self) -> None:
        x = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
        rows: list[str] = []
        with fake_group() as group:
            for name, (wrong, make) in STRANGERS.items():
                outcome = outcome_of(make(Sizes(), group, torch.float64), x).outcome
                assert not outcome.matches
                rows.append(
                    f"{name} ({wrong}):\n{text_of(outcome) if outcome.misses else 'no layer in sight'}"
                )
        self.assertExpectedInline(
            "\n\n".join(rows),
            """\
expert_choice (the experts choose the tokens):
the experts choose their tokens (`tokens`): a token's experts are not the top-k of its own scores,
which is what the op computes
    strangers.py: weights, tokens = torch.topk(probs.t(), x.shape[0] * self.sizes.top_k //
    self.sizes.experts, dim=1)

soft_mixture (the experts get mixtures of tokens):
the experts are given mixtures of all tokens, weighed by `softmax`: no token is sent to its top-k
experts, which is what the op does
    strangers.py: return torch.einsum("te,eh->th", logits.softmax(1), self.ffn(buckets).squeeze(1))

largest_choice (the choices are not summed):
the outputs of a token's experts are joined to their largest, not summed
    strangers.py: return (out * weights.unsqueeze(-1)).amax(dim=1)

many_heads (there is no router):
no layer in sight

sorted_embedding (there are no experts):
no layer in sight

sequence_parallel (the all-to-all has nothing to do with experts):
this all-to-all moves no rows that were sorted by expert
    collectives.py: return funcol.wait_tensor(funcol.all_to_all_single(x, out_splits, in_splits,
    group))""",
        )


class OtherPlaces(TestCase):
    """A shared expert is one where it is added to the layer's own rows; anything else stays as it is."""

    def test_not_the_layers_rows(self) -> None:
        for change in (lambda y: y[:1], lambda y: y[:, :1], lambda y: y.roll(1, 0), lambda y: y.t()):
            layer = build(Spelling(shared="linear"))
            layer.taps["combined"] = lambda m, y, x, routed, change=change: change(y)
            record = outcome_of(layer, *layer.example())
            (call,) = record.calls
            assert "shared_w_gate" not in call.kwargs

    def test_every_refusal_has_a_fault(self) -> None:
        pinned = [f for f in REFUSED if any(f.fits(s) for s in (HOME, SENT, BUCKETS))]
        assert pinned == REFUSED
