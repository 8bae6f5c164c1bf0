"""Rules by stage: each file teaches the pass a few ATen ops."""

from mokfx.passes.rules import counting, exchange, fused, indexing, joining, pointwise, products, shape

__all__ = ["counting", "exchange", "fused", "indexing", "joining", "pointwise", "products", "shape"]
