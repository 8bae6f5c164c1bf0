"""Models without experts, each with a part in common with a mixture: softmax, top-k, gathers, stacked weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, INNER = 8, 4, 12


class Model(nn.Module):
    """Weights for all of the models below; `run(self, x)` is one of them, x is [16, 8]."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))
        self.other = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))
        self.score = nn.Linear(HIDDEN, HEADS)
        self.table = nn.Embedding(32, HIDDEN)
        self.heads_in = nn.Parameter(torch.randn(HEADS, HIDDEN, INNER))
        self.heads_out = nn.Parameter(torch.randn(HEADS, INNER, HIDDEN))
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.patches = nn.Conv2d(1, HIDDEN, 2, 2)
        self.position = nn.Parameter(torch.randn(2, 9, HIDDEN))
        self.register_buffer("ids", torch.arange(16).flip(0) % 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (f(x).view(16, 2, -1).transpose(0, 1) for f in (m.q, m.k, m.v))
    return x + m.o((F.softmax(q @ k.mT / 2, -1) @ v).transpose(0, 1).reshape(16, -1))


def stacked_attention(m: Any, x: Tensor) -> Tensor:
    """The projections of all heads in one tensor."""
    q = torch.einsum("th,nhi->nti", x, m.heads_in)
    scores = torch.einsum("nti,nsi->nts", q, torch.einsum("th,nhi->nti", x, m.heads_in)).softmax(-1)
    return torch.einsum("nts,nsi,nih->th", scores, q, m.heads_out)


def gated_heads(m: Any, x: Tensor) -> Tensor:
    """A softmax over heads weighs what each of them adds."""
    q = torch.einsum("th,nhi->nti", x, m.heads_in)
    heads = torch.einsum("nti,nih->nth", F.scaled_dot_product_attention(q, q, q), m.heads_out)
    return torch.einsum("tn,nth->th", m.score(x).softmax(-1), heads)


def sparse_attention(m: Any, x: Tensor) -> Tensor:
    """Each query attends to its top keys."""
    keys, values = m.k(x), m.v(x)
    weights, ids = (m.q(x) @ keys.t()).topk(4, dim=-1)
    return torch.bmm(weights.softmax(-1).unsqueeze(1), values[ids]).squeeze(1)


def torch_attention(m: Any, x: Tensor) -> Tensor:
    y = x.unsqueeze(0)
    return m.mlp(m.attention(y, y, y)[0].squeeze(0)) + x


def vision(m: Any, x: Tensor) -> Tensor:
    tokens = m.patches(x[:8, :8].reshape(2, 1, 4, 8)[:, :, :, :8]).flatten(2).transpose(1, 2)
    tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1) + m.position[:, :9]
    q, k, v = m.q(tokens), m.k(tokens), m.v(tokens)
    tokens = tokens + m.o(F.softmax(q @ k.transpose(1, 2), -1) @ v)
    return (tokens + m.mlp(tokens))[:, 0]


def batched_mlps(m: Any, x: Tensor) -> Tensor:
    """One network for each group of channels, the same for every token."""
    return torch.bmm(F.silu(torch.bmm(x.expand(HEADS, -1, -1), m.heads_in)), m.heads_out).mean(0)


def embedding(m: Any, x: Tensor) -> Tensor:
    return m.mlp(m.table(m.ids) + x)


def looked_up(m: Any, x: Tensor) -> Tensor:
    return m.mlp(x[m.ids]).softmax(-1) * x


def best_tokens(m: Any, x: Tensor) -> Tensor:
    """Only some tokens pass the block (a mixture of depths)."""
    weights, ids = m.score(x)[:, 0].topk(6)
    return x.index_add(0, ids, m.mlp(x[ids]) * weights.unsqueeze(-1))


def proposals(m: Any, x: Tensor) -> Tensor:
    """The best places of a picture, and the worst, are looked at by two networks."""
    scores = m.score(x).amax(-1)
    best, worst = scores.topk(4).indices, (-scores).topk(4).indices
    return torch.cat([m.mlp(x[best]), m.other(x[worst])])


def neighbours(m: Any, x: Tensor) -> Tensor:
    near = torch.cdist(x, x).topk(3, largest=False).indices
    return m.mlp(x[near]).amax(1)


def squeeze_and_excite(m: Any, x: Tensor) -> Tensor:
    return x * torch.sigmoid(m.mlp(x.mean(0))) + m.other(x) * torch.softmax(m.o(x), -1)


def two_towers(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.mlp(x), m.other(x)]).sum(0) * m.score(x).softmax(-1)[:, :1]


def mixed_weights(m: Any, x: Tensor) -> Tensor:
    """One matrix for all tokens, mixed from several."""
    scores = m.score(x.mean(0)).softmax(-1)
    h = F.relu(x @ torch.einsum("n,nhi->hi", scores, m.heads_in))
    return h @ torch.einsum("n,nih->ih", scores, m.heads_out)


def mixed_layers(m: Any, x: Tensor) -> Tensor:
    """A learned average of the states after each layer."""
    weights = m.score.bias.softmax(0)
    states = [x]
    for _ in range(3):
        states.append(states[-1] + m.mlp(states[-1]))
    return sum(w * s for w, s in zip(weights, states, strict=True))  # type: ignore[return-value]


def beams(m: Any, x: Tensor) -> Tensor:
    scores, ids = m.score(x).log_softmax(-1).view(4, -1).topk(3)
    return x.view(4, 4, -1).gather(1, (ids // HEADS).unsqueeze(-1).expand(-1, -1, HIDDEN)) + scores.unsqueeze(-1)


def reordered(m: Any, x: Tensor) -> Tensor:
    """Hashed attention: sorted by bucket, attended in chunks, put back."""
    order = m.score(x).argmax(-1).argsort(stable=True)
    chunks = x[order].view(4, 4, HIDDEN)
    mixed = F.scaled_dot_product_attention(chunks, chunks, chunks).reshape(16, HIDDEN)
    return mixed[order.argsort()]


ORDINARY = (
    attention, stacked_attention, gated_heads, sparse_attention, torch_attention, vision, batched_mlps, embedding,
    looked_up, best_tokens, proposals, neighbours, squeeze_and_excite, two_towers, mixed_weights, mixed_layers, beams,
    reordered,
)  # fmt: skip
