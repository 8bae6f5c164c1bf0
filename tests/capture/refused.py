"""Loops and branches that look like those of an MoE layer and do more: each must be left to plain Dynamo.

All take x [T, H], ids [T] and w [E, H, H].
"""

from __future__ import annotations

import torch
from torch import Tensor

E = 4


def hits_of(ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(ids, E).sum(0) > 0


class Log:
    calls = 0
    seen: list[int] = []  # noqa: RUF012


log = Log()


def counts_iterations(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, hits = torch.zeros_like(x), 0
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
        hits += 1
    return out / hits


def counts_iterations_in_a_tensor(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, hits = torch.zeros_like(x), torch.zeros(())
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
        hits += 1
    return out / hits


def scales_the_rest(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, scale = torch.zeros_like(x), 1.0
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, (x * scale)[rows] @ w[e[0]])
        scale = scale * 0.5
    return out


def enumerates(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i, e in enumerate(hits_of(ids).nonzero()):
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]] * (i + 1))
    return out


def breaks(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
        if e[0] == 2:
            break
    return out


def has_else(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
    else:
        out = out + 1
    return out


def returns_inside(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
        if e[0] == 2:
            return out
    return out


def reads_the_length(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    hit_experts = hits_of(ids).nonzero()
    for e in hit_experts:
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
    return out / hit_experts.shape[0]


def lists_twice_before(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, hit = torch.zeros_like(x), hits_of(ids)
    number = hit.nonzero().shape[0]
    for e in hit.nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
    return out / number


def lists_twice_after(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, hit = torch.zeros_like(x), hits_of(ids)
    for e in hit.nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
    return out / hit.nonzero().shape[0]


def reads_the_variable(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
    return out * w[e[0], 0, 0]


def sets_an_attribute(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
        log.calls = log.calls + 1
    return out


def _logged(x: Tensor) -> Tensor:
    log.calls = log.calls + 1
    return x


def calls_what_sets_an_attribute(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, _logged(x[rows]) @ w[e[0]])
    return out


def calls_what_fills_a_list(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, notes = torch.zeros_like(x), []

    def noted(tokens: Tensor) -> Tensor:
        notes.append(1)
        return tokens

    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, noted(x[rows]) @ w[e[0]])
    return out / len(notes)


def calls_what_counts(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, calls = torch.zeros_like(x), 0

    def counted(tokens: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return tokens

    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, counted(x[rows]) @ w[e[0]])
    return out / calls


def fills_a_list_of_lists(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, state = torch.zeros_like(x), {"notes": []}
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, _noting(x[rows], state) @ w[e[0]])
    return out / len(state["notes"])


def _noting(tokens: Tensor, state: dict[str, list[int]]) -> Tensor:
    state["notes"].append(1)
    return tokens


def stacks(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    outs = []
    for e in hits_of(ids).nonzero():
        outs.append((x @ w[e[0]]).sum(0))
    return torch.stack(outs)


def fills_a_dict(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    outs = {}
    for e in hits_of(ids).nonzero().flatten().tolist():
        (rows,) = torch.where(ids == e)
        outs[e] = x[rows] @ w[e]
    return torch.cat(list(outs.values()))


def changes_dtype(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out = out + torch.zeros_like(x, dtype=torch.float64).index_add(0, rows, (x[rows] @ w[e[0]]).double())
    return out


def prints(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
        print("ran one expert")
    return out


def comprehends(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x[ids == e[0]] @ w[e[0]] for e in hits_of(ids).nonzero()])


def nested_list(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for (e,) in hits_of(ids).nonzero().tolist():
        (rows,) = torch.where(ids == e)
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def raises_when_empty(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        (rows,) = torch.where(ids == e)
        if rows.shape[0] == 0:
            raise ValueError("an expert without tokens")
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def adds_when_empty(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        (rows,) = torch.where(ids == e)
        if rows.shape[0] == 0:
            out += 1
            continue
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def tests_more(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        (rows,) = torch.where(ids == e)
        if rows.shape[0] == 0 and x.shape[1] > 3:
            continue
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def tests_in_an_expression(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        (rows,) = torch.where(ids == e)
        part = x[rows] @ w[e] if rows.shape[0] else x[rows]
        out.index_add_(0, rows, part)
    return out


def tests_a_threshold(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        (rows,) = torch.where(ids == e)
        if rows.shape[0] < 2:
            continue
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def counts_the_filled(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, filled = torch.zeros_like(x), 0
    for e in range(E):
        (rows,) = torch.where(ids == e)
        if rows.shape[0] == 0:
            continue
        filled += 1
        out.index_add_(0, rows, x[rows] @ w[e])
    return out / filled


def moves_the_offset_too_far(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    rows = x[ids.argsort(stable=True)]
    outs, start = [], 0
    for e, n in enumerate(torch.bincount(ids, minlength=E).tolist()):
        end = start + n
        if n == 0:
            continue
        outs.append(rows[start:end] @ w[e])
        start = end - 1
    return torch.cat(outs)


def _ones_if_empty(x: Tensor, w: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return torch.ones(1, w.shape[1])
    return x @ w


def returns_another_value(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return torch.cat([_ones_if_empty(x[torch.where(ids == e)[0]], w[e]) for e in range(E)])


def _double_unless_empty(x: Tensor, w: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x
    return (x @ w).double()


def returns_another_dtype(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return torch.cat([_double_unless_empty(x[torch.where(ids == e)[0]], w[e]) for e in range(E)])


def _wider_unless_empty(x: Tensor, w: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros_like(x)
    y = x @ w
    return torch.cat([y, y], dim=1)


def returns_another_width(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    outs = []
    for e in range(E):
        outs.append(_wider_unless_empty(x[torch.where(ids == e)[0]], w[e]).sum())
    return torch.stack(outs)


def returns_from_the_graph(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    (rows,) = torch.where(ids == 1)
    tokens = x[rows]
    if tokens.shape[0] == 0:
        return tokens
    return tokens @ w[1]


def sets_another_value(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        (rows,) = torch.where(ids == e)
        tokens = x[rows]
        if tokens.shape[0] == 0:  # noqa: SIM108 (the statement is what is tested)
            part = tokens.new_full((1, 6), 7.0)
        else:
            part = tokens @ w[e]
        out[: part.shape[0]] += part
    return out


def runs_the_enabled(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, enabled = torch.zeros_like(x), ids.new_ones(E).index_fill(0, ids[:1], 0)
    for e in enabled.nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
    return out


def runs_the_busy(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, counts = torch.zeros_like(x), torch.bincount(ids, minlength=E)
    for e in (counts > 1).nonzero():
        (rows,) = torch.where(ids == e[0])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
    return out


def runs_the_next(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero().flatten().tolist():
        (rows,) = torch.where(ids == (e + 1) % E)
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def changes_the_ids(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, ids = torch.zeros_like(x), ids.clone()
    hit = hits_of(ids)
    ids.add_(1).remainder_(E)
    for e in hit.nonzero().flatten().tolist():
        (rows,) = torch.where(ids == e)
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def changes_the_mask(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), torch.nn.functional.one_hot(ids, E).t()
    hit = mask.sum(1) > 0
    mask[:, 0] = 1
    for e in hit.nonzero().flatten().tolist():
        (rows,) = torch.where(mask[e])
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def adds_for_every_token(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero():
        out += x @ w[e[0]]
    return out


def skips_by_a_flag(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, flags = torch.zeros_like(x), ids.new_ones(E).index_fill(0, ids[:1], 0)
    for e in range(E):
        (rows,) = torch.where(ids == e)
        if flags[e].item() == 0:
            continue
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def skips_by_another_expert(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    counts = torch.bincount(ids, minlength=E).tolist()
    for e in range(E):
        (rows,) = torch.where(ids == e)
        if counts[e - 1] == 0:
            continue
        out.index_add_(0, rows, x[rows] @ w[e])
    return out


def writes_in_an_inner_loop(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in hits_of(ids).nonzero().flatten().tolist():
        for i in range(2 if e % 2 else 0):
            (rows,) = torch.where(ids == e - 1 + i)
            out.index_add_(0, rows, x[rows] @ w[e])
    return out


def skips_another_round(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    mask = torch.nn.functional.one_hot(ids, E).t()
    for e in (mask.sum(1) > 0).nonzero():
        if e[0] == 0:
            continue
        (rows,) = torch.where(mask[e[0] - 1])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
    return out


def _marking(tokens: Tensor, seen: Tensor) -> Tensor:
    seen.add_(1)
    return tokens


def calls_what_writes(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out, seen = torch.zeros_like(x), torch.zeros(())
    for e in range(E):
        (rows,) = torch.where(ids == e)
        if rows.numel() == 0:
            continue
        out.index_add_(0, rows, _marking(x[rows], seen) @ w[e])
    return out / seen


def has_no_weight_for_the_last(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    mask = torch.nn.functional.one_hot(ids, E + 1).t()
    for e in (mask.sum(1) > 0).nonzero():
        (rows,) = torch.where(mask[e[0]])
        out.index_add_(0, rows, x[rows] @ w[e[0]])
    return out


LOOPS = [
    *(
        counts_iterations,
        counts_iterations_in_a_tensor,
        scales_the_rest,
        enumerates,
        breaks,
        has_else,
        returns_inside,
    ),
    *(reads_the_length, lists_twice_before, lists_twice_after, reads_the_variable, sets_an_attribute),
    *(
        calls_what_sets_an_attribute,
        calls_what_fills_a_list,
        calls_what_counts,
        fills_a_list_of_lists,
        stacks,
    ),
    *(
        fills_a_dict,
        changes_dtype,
        prints,
        comprehends,
        nested_list,
        runs_the_enabled,
        runs_the_busy,
        runs_the_next,
    ),
    *(changes_the_ids, changes_the_mask, adds_for_every_token, writes_in_an_inner_loop, skips_another_round),
    has_no_weight_for_the_last,
]
BRANCHES = [
    *(
        raises_when_empty,
        adds_when_empty,
        tests_more,
        tests_in_an_expression,
        tests_a_threshold,
        counts_the_filled,
    ),
    *(moves_the_offset_too_far, returns_another_value, returns_another_dtype, returns_another_width),
    *(
        returns_from_the_graph,
        sets_another_value,
        skips_by_a_flag,
        skips_by_another_expert,
        calls_what_writes,
    ),
]
