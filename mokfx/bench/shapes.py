"""Layers by name: the MoE layers of public models."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """One layer and how many tokens go through it."""

    name: str
    width: int
    inner: int
    experts: int
    choices: int
    tokens: int = 8192

    @property
    def flops(self) -> float:
        """Of the routed experts' forward."""
        return 6.0 * self.tokens * self.choices * self.width * self.inner


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("olmoe", 2048, 1024, 64, 8),
        Shape("mixtral", 4096, 14336, 8, 2),
        Shape("dsv3/32e", 7168, 2048, 32, 8, 4096),
        Shape("dsv3", 7168, 2048, 256, 8),
        Shape("kimi-k2", 7168, 2048, 384, 8),
        Shape("gpt-oss-120b", 2880, 2880, 128, 4),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("glm-4.5-air", 4096, 1408, 128, 8),
    )
}


def parse(text: str) -> Shape:
    """A shape by name, or "H,I,E,k,T" in numbers; "name@T" changes the tokens. Else raises ValueError."""
    name, _, tokens = text.partition("@")
    if name in SHAPES:
        return replace(SHAPES[name], tokens=int(tokens)) if tokens else SHAPES[name]
    try:
        width, inner, experts, choices, count = (int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is neither a shape ({', '.join(SHAPES)}) nor five numbers H,I,E,k,T") from None
    return Shape(text, width, inner, experts, choices, count)
