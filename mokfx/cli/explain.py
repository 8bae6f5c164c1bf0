"""`mokfx explain`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch._dynamo.eval_frame import OptimizedModule

import mokfx
from mokfx.page.cards import CARDS, DEFAULT
from mokfx.page.render import require_jinja

from .command import Command
from .factory import HELP, blamed_on, make
from .progress import progress
from .ranks import HELP as RANKS_HELP
from .ranks import process_group, rank


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factory", metavar="module:factory", help=HELP)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--html", metavar="FILE", help="write a page with pictures of the graphs; it needs no network")
    output.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--card", choices=list(CARDS), default=DEFAULT, help="the GPU whose floors the page shows")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.html is not None:
        require_jinja()  # before a long model is traced for nothing
    with process_group():
        first = rank() == 0
        doing = progress("explain", shown=first)
        made = make(arguments.factory)
        with doing("tracing the model"), blamed_on(f"the model of {arguments.factory}"):
            report = mokfx.explain(_compiled(made.model), *made.args, **made.kwargs)
        if first and arguments.html is not None:
            with doing("drawing the page"):
                report.html(arguments.html, card=arguments.card, title=arguments.factory)
    if first and arguments.json:
        print(json.dumps(as_json(report), indent=2))
    elif first and arguments.html is not None:
        print(f"{str(report).splitlines()[0]}\nwritten to {arguments.html}")
    elif first:
        print(report)
    return 0


def as_json(report: mokfx.Report) -> dict[str, Any]:
    """The report as values that JSON has: all but the code of the graphs and their pictures."""
    return {
        "matches": [asdict(match) for match in report.matches],
        "misses": [asdict(miss) for miss in report.misses],
        "graph_breaks": [asdict(graph_break) for graph_break in report.graph_breaks],
        "graphs": [
            {"nodes_before": graph.nodes_before, "nodes_after": graph.nodes_after, "seconds": graph.seconds}
            for graph in report.graphs
        ],
    }


def _compiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model as `mokfx.compile` captures it, unless the factory has compiled it in a way of its own."""
    own = isinstance(model, OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable")
    return model if own else mokfx.compile(model)


COMMAND = Command(
    name="explain",
    summary="say what became of a model's MoE layers, in the terminal or as a page with pictures",
    description="Trace a model once and say which MoE layers become one call of mok.moe, what was recognised in "
    "each, and why any other was left alone, with the line. With --html, write that as one page: each layer before and "
    "after as a picture, what each value means, the work of the layer and the least time it takes on a GPU. The model "
    "is captured as mokfx.compile does, or as the factory compiled it. "
    f"{RANKS_HELP} The page needs pip install \"mokfx[report]\"; Graphviz, if its program dot is installed, lays "
    "the pictures out.",
    add_arguments=_add_arguments,
    run=_run,
)
