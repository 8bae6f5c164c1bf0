"""Layers by name: the MoE layers of public models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import BenchError


@dataclass(frozen=True)
class Shape:
    """One layer and how many tokens each rank has.

    Attributes:
        width, inner, experts, choices: H, I, E of all ranks, k.
        tokens: T of each rank.
        shared: width of the model's shared expert, 0 for none.
        interleaved: gate's and up's columns alternate; else all of gate's come first.
        clamp: (alpha, limit) of a clamped SwiGLU, None for SwiGLU.
        biased: all layers have biases.
        in_out: weights lie as [in, out], as the model stores them; else as nn.Linear does, [out, in].
    """

    name: str
    width: int
    inner: int
    experts: int
    choices: int
    tokens: int = 8192
    shared: int = 0
    interleaved: bool = False
    clamp: tuple[float, float] | None = None
    biased: bool = False
    in_out: bool = False

    @property
    def flops(self) -> float:
        """Of the forward on each rank: two a multiplication, of the products alone."""
        return 6.0 * self.tokens * self.width * (self.choices * self.inner + self.shared)

    def __str__(self) -> str:
        extra = f", shared expert {self.shared}" if self.shared else ""
        return (
            f"{self.name}: H {self.width}, I {self.inner}, E {self.experts}, k {self.choices}, "
            f"T {self.tokens} a rank{extra}"
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("olmoe", 2048, 1024, 64, 8),
        Shape("mixtral", 4096, 14336, 8, 2),
        Shape("dsv3/32e", 7168, 2048, 32, 8, 4096, shared=2048),  # a rank's share of eight
        Shape("dsv3", 7168, 2048, 256, 8, shared=2048),
        Shape("kimi-k2", 7168, 2048, 384, 8, shared=2048),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("glm-4.5-air", 4096, 1408, 128, 8, shared=1408),
        Shape(
            "gpt-oss-120b", 2880, 2880, 128, 4, interleaved=True, clamp=(1.702, 7.0), biased=True, in_out=True
        ),
    )
}


def parse(text: str, *, shared: bool = False, in_out: bool | None = None) -> Shape:
    """A layer by name, "name@T" with other tokens, or five numbers "H,I,E,k,T".

    Args:
        shared: keep the model's shared expert; else only the routed experts.
        in_out: how weights lie; None: as the model stores them.

    Raises:
        BenchError: no layer has that name, or the numbers cannot be a layer's.
    """
    name, at, count = text.partition("@")
    if name in SHAPES:
        shape = SHAPES[name]
        if at:
            shape = replace(shape, name=text, tokens=_whole(count, text))
    else:
        parts = text.split(",")
        if len(parts) != 5:
            raise BenchError(f"{text!r} is neither a layer ({', '.join(SHAPES)}), nor name@T, nor numbers H,I,E,k,T")
        width, inner, experts, choices, tokens = (_whole(part, text) for part in parts)
        shape = Shape(text, width, inner, experts, choices, tokens)
    if shape.choices > shape.experts:
        raise BenchError(f"layer {text!r} chooses {shape.choices} of {shape.experts} experts; k is at most E")
    return replace(
        shape, shared=shape.shared if shared else 0, in_out=shape.in_out if in_out is None else in_out
    )


def _whole(text: str, whole: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise BenchError(f"layer {whole!r}: {text!r} is not a positive whole number")
    return int(text)
