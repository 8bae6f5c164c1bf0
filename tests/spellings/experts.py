"""Experts: rows in order of local expert [n, H] through each expert's own network to [n, H]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .networks import GATED, INTERLEAVED, SPLIT, UNGATED

Project = Callable[[str, Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """The parameters of a rank's `count` experts, stored as a spelling wants them, and the network over them.

    fused: "apart", or how a fused product is split (networks.SPLIT); storage: "in_out" (x @ w) or
    "out_in" (F.linear); listed: a projection is an `nn.ModuleList` of `nn.Linear`s, not one stacked tensor.
    """

    def __init__(
        self,
        count: int,
        hidden: int,
        intermediate: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        act: str,
        fused: str,
        up_first: bool,
        storage: str,
        bias: bool,
        listed: bool,
        products: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.count, self.act, self.gated, self.split, self.up_first = (
            count,
            act,
            act in GATED,
            fused,
            up_first,
        )
        self.activation: Any = GATED[act][1] if self.gated else None
        self.activation1: Any = None if self.gated else UNGATED[act][1]
        self.storage, self.listed, self.products = storage, listed, PRODUCTS[products]
        self.hidden_tap: Callable[[Tensor], Tensor] | None = None  # where faults are planted
        self.shift = 0  # another one: expert e uses the weights of e + shift
        self.names = ("gate", "up", "down") if self.gated and fused == "apart" else ("up", "down")
        sizes = {"gate": (hidden, intermediate), "up": (hidden, intermediate), "down": (intermediate, hidden)}
        if self.gated and fused != "apart":
            sizes["up"] = (hidden, 2 * intermediate)
        for name in self.names:
            i, o = sizes[name]
            if listed:
                linears = nn.ModuleList(nn.Linear(i, o, bias=bias, dtype=dtype) for _ in range(ranks * count))
                self.add_module(name, linears[rank * count : (rank + 1) * count])
                continue
            # Drawn for all ranks, then cut: the ranks' layers are one layer's, from one seed.
            shape = (ranks, count, i, o) if storage == "in_out" else (ranks, count, o, i)
            everybody = torch.randn(shape, dtype=dtype) / i**0.5
            self.register_parameter(name, nn.Parameter(everybody[rank].clone()))
            if bias:
                everybody = torch.randn(ranks, count, o, dtype=dtype) / 4
                self.register_parameter(name + "_bias", nn.Parameter(everybody[rank].clone()))

    def weight(self, name: str) -> Tensor:
        """The stacked weight of a projection as [count, in, out], as every grouped product wants it."""
        w = getattr(self, name)
        if self.shift:
            w = w.roll(-self.shift, 0)
        return w if self.storage == "in_out" else w.transpose(1, 2)

    def network(self, rows: Tensor, project: Project, weight: Tensor | None) -> Tensor:
        """One network, its products done by `project(name, rows)`; `weight` [n, 1] scales the hidden."""
        if not self.gated:
            h = self.activation1(project("up", rows))
        else:
            if self.split == "apart":
                g, u = project("gate", rows), project("up", rows)
            else:
                g, u = SPLIT[self.split](project("up", rows))
                if self.up_first:
                    g, u = u, g
            h = self.activation(g, u)
        if self.hidden_tap is not None:
            h = self.hidden_tap(h)
        if weight is not None:
            h = (h * weight).to(rows.dtype)
        return project("down", h)

    def one(self, e: Any, rows: Tensor) -> Tensor:
        """Expert `e` alone, on its own rows."""
        return self.network(rows, _one(self, e), None)

    def batched(self, buckets: Tensor, products: str) -> Tensor:
        """Buckets [count, C, H], one an expert, to the same shape."""
        if products in LOOPS:
            return torch.stack([self.one(e, bucket) for e, bucket in enumerate(buckets.unbind(0))])
        return self.network(buckets, _batched(self, BATCHED[products]), None)

    def gathered(self, rows: Tensor, expert: Tensor, weight: Tensor | None = None) -> Tensor:
        """Each row through expert `expert[row]`."""

        def project(name: str, r: Tensor) -> Tensor:
            out = torch.bmm(r.unsqueeze(1), self.weight(name)[expert]).squeeze(1)
            bias = getattr(self, name + "_bias", None)
            return out if bias is None else out + bias[expert]

        return self.network(rows, project, weight)

    def forward(self, rows: Tensor, counts: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.products(self, rows, counts, weight)


def _add_bias(m: Experts, name: str, out: Tensor, counts: Tensor) -> Tensor:
    bias = getattr(m, name + "_bias", None)
    return out if bias is None else out + bias.repeat_interleave(counts, dim=0, output_size=out.shape[0])


def grouped_mm(m: Experts, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)

    def project(name: str, r: Tensor) -> Tensor:
        return _add_bias(m, name, torch._grouped_mm(r, m.weight(name), offs=offs), counts)

    return m.network(rows, project, weight)


def functional_grouped_mm(m: Experts, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    offs = counts.cumsum(0).to(torch.int32)

    def project(name: str, r: Tensor) -> Tensor:
        return _add_bias(m, name, F.grouped_mm(r, m.weight(name), offs=offs), counts)

    return m.network(rows, project, weight)


def _padded(
    m: Experts,
    rows: Tensor,
    counts: Tensor,
    weight: Tensor | None,
    product: Product,
) -> Tensor:
    """Rows into [count, n, H] by their place in their group, batched products, and out again."""
    n = rows.shape[0]
    expert = torch.repeat_interleave(torch.arange(m.count, device=rows.device), counts, output_size=n)
    starts = counts.cumsum(0) - counts
    place = torch.arange(n, device=rows.device) - starts[expert]
    padded = rows.new_zeros(m.count, n, rows.shape[-1])
    padded[expert, place] = rows
    if weight is not None:
        padded_weight = weight.new_zeros(m.count, n, 1)
        padded_weight[expert, place] = weight
        weight = padded_weight

    return m.network(padded, _batched(m, product), weight)[expert, place]


def _batched(m: Experts, product: Product) -> Project:
    """The products of all experts at once, on [count, rows, in]."""

    def project(name: str, r: Tensor) -> Tensor:
        out = product(r, m.weight(name))
        bias = getattr(m, name + "_bias", None)
        return out if bias is None else out + bias.unsqueeze(1)

    return project


BATCHED: dict[str, Product] = {
    "padded_bmm": torch.bmm,
    "padded_matmul": lambda r, w: r @ w,
    "padded_einsum": lambda r, w: torch.einsum("enh,ehi->eni", r, w),
}


def padded_bmm(m: Experts, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    return _padded(m, rows, counts, weight, BATCHED["padded_bmm"])


def padded_matmul(m: Experts, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    return _padded(m, rows, counts, weight, BATCHED["padded_matmul"])


def padded_einsum(m: Experts, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    return _padded(m, rows, counts, weight, BATCHED["padded_einsum"])


def gathered(m: Experts, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    """Every row brings its own copy of its expert's weights."""
    local = torch.arange(m.count, device=rows.device)
    return m.gathered(rows, local.repeat_interleave(counts, output_size=rows.shape[0]), weight)


def _one(m: Experts, e: Any) -> Project:
    """The products of expert `e` alone, as a loop over experts writes them."""
    if m.shift:
        e = (e + m.shift) % m.count

    def project(name: str, r: Tensor) -> Tensor:
        if m.listed:
            return getattr(m, name)[e](r)
        bias = getattr(m, name + "_bias", None)
        if m.storage == "out_in":
            return F.linear(r, getattr(m, name)[e], None if bias is None else bias[e])
        out = r @ getattr(m, name)[e]
        return out if bias is None else out + bias[e]

    return project


def loop_split(m: Experts, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    sizes = counts.tolist()
    weights = [None] * m.count if weight is None else weight.split(sizes)
    outs = []
    for e, chunk in enumerate(torch.split(rows, sizes)):
        outs.append(m.network(chunk, _one(m, e), weights[e]))
    return torch.cat(outs, dim=0)


def loop_slices(m: Experts, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    """Slices between running sums, written into an empty output."""
    out = torch.empty_like(rows)
    start = 0
    for e, size in enumerate(counts.tolist()):
        end = start + size
        scale = None if weight is None else weight[start:end]
        out[start:end] = m.network(rows[start:end], _one(m, e), scale)
        start = end
    return out


def loop_offsets(m: Experts, rows: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    """Slices at offsets read one by one."""
    ends = counts.cumsum(0)
    outs = []
    for e in range(m.count):
        end, size = int(ends[e].item()), int(counts[e].item())
        chunk = rows[end - size : end]
        outs.append(m.network(chunk, _one(m, e), None if weight is None else weight[end - size : end]))
    return torch.cat(outs)


PRODUCTS: dict[str, Callable[[Experts, Tensor, Tensor, Tensor | None], Tensor]] = {
    f.__name__: f
    for f in (
        grouped_mm,
        functional_grouped_mm,
        padded_bmm,
        padded_matmul,
        padded_einsum,
        gathered,
        loop_split,
        loop_slices,
        loop_offsets,
    )
}
GROUPED = {"grouped_mm", "functional_grouped_mm"}
"""torch has these in bf16 only, as far as compiling goes."""
LOOPS = {"loop_split", "loop_slices", "loop_offsets"}
"""Only these can use listed `nn.Linear`s."""


def layout(fused: str, up_first: bool) -> str:
    """The name of a fused weight's column order."""
    if fused == "apart":
        return "apart"
    if fused in INTERLEAVED:
        return "interleaved_up_gate" if up_first else "interleaved"
    return "up_gate" if up_first else "gate_up"
