"""Layers by name and by numbers, and a sentence for each mistake."""

from __future__ import annotations

import pytest

from mokfx.bench.errors import BenchError
from mokfx.bench.shapes import SHAPES, Shape, parse


def test_every_layer_goes_by_its_name() -> None:
    wanted = "qwen3-30b qwen3-235b dsv3 kimi-k2 gpt-oss-120b mixtral glm-4.5-air olmoe"
    assert set(wanted.split()) <= set(SHAPES)
    for name in SHAPES:
        assert parse(name).name == name


def test_the_shared_expert_is_asked_for() -> None:
    assert parse("dsv3").shared == 0
    assert parse("dsv3", shared=True).shared == 2048
    assert parse("dsv3", shared=True).flops - parse("dsv3").flops == 6 * 8192 * 7168 * 2048


def test_gpt_oss_is_the_models_own() -> None:
    shape = parse("gpt-oss-120b")
    assert (shape.interleaved, shape.clamp, shape.biased, shape.in_out) == (True, (1.702, 7.0), True, True)
    assert not parse("gpt-oss-120b", in_out=False).in_out


def test_tokens_and_numbers() -> None:
    assert parse("olmoe@100") == Shape("olmoe@100", 2048, 1024, 64, 8, 100)
    assert parse("128, 64,8,2,100") == Shape("128, 64,8,2,100", 128, 64, 8, 2, 100)
    assert parse("128,64,8,2,100").flops == 6 * 100 * 2 * 128 * 64


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("qwen", "'qwen' is neither a layer"),
        ("1,2,3", "nor numbers H,I,E,k,T"),
        ("olmoe@many", "'many' is not a positive whole number"),
        ("olmoe@", "'' is not a positive whole number"),
        ("128,64,8,2,-5", "'-5' is not a positive whole number"),
        ("128,64,8,0,5", "'0' is not a positive whole number"),
        ("128,64,8,9,5", "chooses 9 of 8 experts"),
    ],
)
def test_mistakes_are_told(text: str, sentence: str) -> None:
    with pytest.raises(BenchError, match=sentence):
        parse(text)
