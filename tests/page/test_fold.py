"""Steps that do the same for one expert each are drawn as one."""

from __future__ import annotations

from dataclasses import replace

from mokfx.page.fold import fold, nearest
from mokfx.page.picture import Step


def step(name: str, op: str, *inputs: int, meaning: str = "", weights: tuple[str, ...] = ()) -> Step:
    return Step(name, op, "experts", meaning=meaning, where="model.py:1", inputs=inputs, weights=weights)


def shown(steps: tuple[Step, ...]) -> list[str]:
    return [f"{s.op} x{s.count} <- {list(s.inputs)} {s.meaning}".strip() for s in steps]


def test_a_loop_over_experts() -> None:
    steps = [step("parts", "split")]
    for e in range(3):
        steps.append(step(f"p{e}", "getitem", 0, meaning=f"rows of x, for expert {e}"))
        steps.append(step(f"u{e}", "linear", len(steps) - 1, weights=(f"layers_3_up_{e}_weight",)))
    steps.append(step("cat", "cat", 2, 4, 6))
    folded = fold(steps)
    assert shown(folded) == [
        "split x1 <- []",
        "getitem x3 <- [0] rows of x, for each expert",
        "linear x3 <- [1]",
        "cat x1 <- [2]",
    ]
    assert folded[2].weights == ("layers_3_up_*_weight x3",)


def test_a_sum_over_experts_that_goes_on_from_itself() -> None:
    steps = [step("y", "zeros"), step("rows", "linear")]
    for _ in range(4):
        steps.append(step("y", "index_add", len(steps) - 1 if len(steps) > 2 else 0, 1))
    assert shown(fold(steps)) == ["zeros x1 <- []", "linear x1 <- []", "index_add x4 <- [0, 1]"]


def test_a_sum_over_experts_in_several_steps() -> None:
    """y[token] += rows is a getitem, an add and a setitem, and the next getitem reads what the setitem wrote."""
    steps = [step("y", "zeros"), step("rows", "linear")]
    for e in range(3):
        written = [len(steps) - 1] if e else []
        steps.append(step("got", "getitem", 0, *written, meaning=f"sums of expert {e}" if e else ""))
        steps.append(step("added", "iadd", 1, len(steps) - 1))
        steps.append(step("set", "setitem", 0, len(steps) - 1))
    folded = fold(steps)
    assert [(s.op, s.count) for s in folded] == [
        ("zeros", 1),
        ("linear", 1),
        ("getitem", 3),
        ("iadd", 3),
        ("setitem", 3),
    ]
    assert all(i < own for own, s in enumerate(folded) for i in s.inputs)


def test_what_differs_stays_apart() -> None:
    base = step("a", "linear", meaning="gate projection, for expert 0")
    for other in (
        replace(base, op="matmul"),
        replace(base, stage="combine"),
        replace(base, where="model.py:2"),
        replace(base, meaning="up projection, for expert 0"),
        replace(base, kept=True),
    ):
        assert len(fold([base, other])) == 2
    assert len(fold([base, replace(base, meaning="gate projection, for expert 7")])) == 1


def test_layers_are_not_a_chain() -> None:
    layers = [step("norm", "rms_norm", *([i - 1] if i else [])) for i in range(3)]
    assert len(fold(layers)) == 1
    assert len(fold(layers, chains=False)) == 3


def test_the_nearest_steps() -> None:
    line = tuple(step(f"n{i}", "relu", *([i - 1] if i else [])) for i in range(10))
    near = nearest(line, 5, before=2, after=1)
    assert [s.name for s in near] == ["n3", "n4", "n5", "n6"]
    assert [s.inputs for s in near] == [(), (0,), (1,), (2,)]
