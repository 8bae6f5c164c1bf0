"""Where in the user's program a graph node comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch
from torch.fx import Node

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)\n(?P<code>[^\n]*)')


@dataclass(frozen=True)
class Source:
    where: str
    """`file.py:line`, or the node's name if no line is known."""
    code: str


def source_of(node: Node) -> Source:
    """The innermost line of a node outside of torch itself."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = [frame for frame in frames if not frame["file"].startswith(_TORCH)]
    if not frames:
        return Source(f"graph node {node.name}", "")
    frame = (own or frames)[-1]
    return Source(f"{os.path.basename(frame['file'])}:{frame['line']}", frame["code"].strip())
