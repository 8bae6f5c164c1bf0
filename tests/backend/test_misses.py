"""What is told of a layer that was left alone, and how: here, because the graph broke inside it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.utils import counters

import mokfx

from . import models
from .models import Dense, MoE, tokens


def line_of(code: str) -> int:
    """Of the first line of models.py that holds `code`."""
    lines = Path(models.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if code in line)


BREAK = line_of(".tolist()")
REASON = (
    f"the graph broke here, after models.py:{line_of('.topk(')} chose the experts and before they were "
    "combined (Operator `aten._local_scalar_dense.default` has a non-Tensor output whose value is dependent "
    "on the data of Tensor inputs); compile with fullgraph=True or with mokfx.compile(model), which capture "
    "sizes that depend on data"
)


def compiled(model: torch.nn.Module, on_miss: str) -> torch.nn.Module:
    options = {"mok.on_miss": on_miss, "mok.compiler": "eager"}
    return torch.compile(model, backend="mok", options=options)  # type: ignore[return-value]


def test_counters() -> None:
    compiled(MoE(), "ignore")(tokens())
    assert counters["mok"] == {"matched": 0, "missed": 1, REASON: 1}


def test_warn_names_the_line_and_warns_once() -> None:
    model = MoE()
    with pytest.warns(mokfx.MissWarning) as caught:
        compiled(model, "warn")(tokens())
    (warning,) = caught
    assert (warning.filename, warning.lineno) == ("models.py", BREAK)
    assert str(warning.message).endswith(REASON)
    with warnings.catch_warnings(action="error", category=mokfx.MissWarning):
        compiled(MoE(), "warn")(tokens(7))
    torch._dynamo.reset()
    with pytest.warns(mokfx.MissWarning):
        compiled(model, "warn")(tokens())


def test_raise() -> None:
    with pytest.raises(mokfx.MissError) as raised:
        compiled(MoE(), "raise")(tokens())
    (miss,) = raised.value.misses
    assert (miss.where, miss.reason) == (f"models.py:{BREAK}", REASON)
    assert str(raised.value).startswith(
        f"1 MoE layer was left alone, and mok.on_miss is 'raise':\n  models.py:{BREAK} `counts = "
    )


def test_raise_lets_models_without_moe_pass() -> None:
    x = torch.randn(5, 8)
    model = Dense().eval()
    assert torch.equal(compiled(model, "raise")(x), model(x))


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mokfx"):
        compiled(MoE(), "ignore")(tokens())
    (record,) = [record for record in caplog.records if record.name == "mokfx.report"]
    assert record.levelno == logging.INFO
    assert "1 left alone" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="mokfx"):
        torch._dynamo.reset()
        compiled(MoE(), "ignore")(tokens())
    texts = [record.getMessage() for record in caplog.records if record.name == "mokfx.graph"]
    assert texts[0].startswith("before:\nclass GraphModule")
    assert texts[1].startswith("after:\nclass GraphModule")


def test_print() -> None:
    report = mokfx.explain(MoE(), tokens())
    assert_expected_inline(
        str(report),
        """\
mokfx: no MoE layer was rewritten, 1 left alone (2 graphs, 1 graph break; 43 nodes)

left alone:
  models.py:36 `counts = F.one_hot(slots, EXPERTS).sum(0).tolist()`: the graph broke here, after
      models.py:33 chose the experts and before they were combined (Operator
      `aten._local_scalar_dense.default` has a non-Tensor output whose value is dependent on the
      data of Tensor inputs); compile with fullgraph=True or with mokfx.compile(model), which
      capture sizes that depend on data

graph breaks:
  models.py:36 `counts = F.one_hot(slots, EXPERTS).sum(0).tolist()`: Operator
      `aten._local_scalar_dense.default` has a non-Tensor output whose value is dependent on the
      data of Tensor inputs.""",
    )
