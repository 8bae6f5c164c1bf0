"""What a card can do at best, for the floor of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """One GPU's rates, in bf16 and without sparsity."""

    name: str
    flops: float
    """FLOP/s."""
    hbm: float
    """Bytes/s, read and written together."""
    nvlink: float
    """Bytes/s that leave the card; as many arrive at the same time."""
    source: str
    measured: bool = False


CARDS = {
    card.name: card
    for card in (
        Card("A100", 312e12, 2.039e12, 300e9, "peak figures, NVIDIA A100 80GB SXM datasheet"),
        Card("H100", 989e12, 3.35e12, 450e9, "peak figures, NVIDIA H100 SXM datasheet"),
        Card(
            "H200",
            790e12,
            4.3e12,
            390e9,
            "measured on a pair of H200: cuBLAS bf16 products, HBM copies, NVLink stores from SM code",
            measured=True,
        ),
        Card("B200", 2250e12, 8.0e12, 900e9, "peak figures, NVIDIA Blackwell architecture brief, HGX B200"),
    )
}
DEFAULT = "H200"
