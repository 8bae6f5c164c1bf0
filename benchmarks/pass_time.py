"""How much of a model's compile time the pass takes.

    python benchmarks/pass_time.py [--layers 24] [--compiler inductor]

Compiles forward and backward of a transformer with an MoE layer in each block, with empty caches, and
prints the ratio first: seconds in the pass / seconds from the first call to the end of the first backward.
"""

from __future__ import annotations

import argparse
import logging
import platform
import shlex
import sys
import time

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from mokfx.demo_model import Attention, MoE
from mokfx.report import GraphReport


class Layer(nn.Module):
    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_moe = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads=4)
        self.moe = MoE(hidden, intermediate=96, num_experts=num_experts, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.moe(self.norm_moe(x).flatten(0, 1)).view_as(x)


class Listener(logging.Handler):
    """Keeps the reports that the backend logs."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[GraphReport] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple):
            self.reports += [argument for argument in record.args if isinstance(argument, GraphReport)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), default="inductor")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(64, arguments.experts) for _ in range(arguments.layers)))
    x = torch.randn(2, 64, 64)
    compiled = torch.compile(
        model, backend="mok", fullgraph=True, options={"mok.compiler": arguments.compiler}
    )
    listener = Listener()
    log = logging.getLogger("mokfx.report")
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    log.propagate = False
    with fresh_cache():
        start = time.perf_counter()
        compiled(x).sum().backward()
        total = time.perf_counter() - start
    (report,) = listener.reports
    assert len(report.matches) == arguments.layers, report

    ratio = report.seconds / total
    print(f"ratio {ratio:.3f}: {report.seconds:.2f} s in the pass, of {total:.1f} s of compilation")
    print(f"{arguments.layers} layers, {report.nodes_before} nodes before and {report.nodes_after} after")
    print(f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads")
    print(f"command: python {shlex.join(sys.argv)}")


if __name__ == "__main__":
    main()
