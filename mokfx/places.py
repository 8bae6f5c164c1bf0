"""Where in the user's source a thing came from."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from traceback import FrameSummary

import torch
from torch.fx import Node

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')


def place_of_frames(stack: Sequence[FrameSummary]) -> tuple[str, str]:
    """(`file.py:line`, source text) of the innermost frame outside torch; ("", "") of an empty stack."""
    for frame in reversed(stack):
        if not frame.filename.startswith(_TORCH):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}", (frame.line or "").strip()
    return "", ""


def place_of_node(node: Node) -> tuple[str, str]:
    """The same, of the statement that recorded `node`."""
    frames = [
        frame for frame in _FRAME.finditer(node.stack_trace or "") if not frame["path"].startswith(_TORCH)
    ]
    if not frames:
        return "", ""
    return f"{os.path.basename(frames[-1]['path'])}:{frames[-1]['line']}", frames[-1]["code"].strip()


def was_resumed(node: Node) -> bool:
    """Whether `node` was recorded in a function that Dynamo resumed after a graph break."""
    frames = _FRAME.finditer(node.stack_trace or "")
    return any(frame["function"].startswith("torch_dynamo_resume_in_") for frame in frames)
