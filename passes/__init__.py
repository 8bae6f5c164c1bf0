"""The compiler pass: understand a captured graph, find its MoE layers, rewrite each into one `mok.moe` call."""

from mokfx.passes.outcome import Match, Miss, Outcome
from mokfx.passes.rewrite import rewrite

__all__ = ["Match", "Miss", "Outcome", "rewrite"]
