"""Contexts that let a model be traced and run once, and put back everything that this changed."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import convert_frame, pgo
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@contextlib.contextmanager
def undisturbed_dynamo(backend: object) -> Iterator[None]:
    """Leave Dynamo as it was: its counters, what it knows of varying sizes, and its compiled code.

    `torch._dynamo.reset` would also throw away what other backends have compiled, so the entries that
    `backend` adds to the caches are dropped one by one.
    """
    codes: set[CodeType] = set()
    hook = convert_frame.register_bytecode_hook(lambda code, _: codes.add(code))
    saved_counters = {name: Counter(counts) for name, counts in counters.items()}
    saved_sizes = pgo._CODE_STATE
    pgo._CODE_STATE = copy.deepcopy(pgo.get_code_state())
    try:
        # A code object that has used up its compilations would be run uncompiled, and nothing would be seen.
        with torch._dynamo.config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20):
            yield
    finally:
        hook.remove()
        counters.clear()
        counters.update(saved_counters)
        pgo._CODE_STATE = saved_sizes
        for code in codes:
            _drop_entries(code, backend)


def _drop_entries(code: CodeType, backend: object) -> None:
    entries = _debug_get_cache_entry_list(code)
    own = [entry for entry in entries if innermost_backend(entry.backend) is backend]
    # Invalid entries stay and count. From torch 2.13 on they count apart from those of others, so that
    # these need not be given up for the function to stay within Dynamo's limit of compilations.
    isolated = all(getattr(entry, "isolate_recompiles_id", -1) != -1 for entry in own)
    if len(own) == len(entries) or not isolated:
        reset_code(code)
        return
    for entry in own:
        if (state := entry.guard_manager.extra_state) is not None:
            state.invalidate(entry, DeletedGuardManagerWrapper("mokfx.explain is over"))


@contextlib.contextmanager
def undisturbed_state(model: Callable[..., Any]) -> Iterator[None]:
    """Leave the random generators as they were; of a module (or a method's) buffers and attributes too."""
    owner = getattr(model, "__self__", model)
    modules = list(owner.modules()) if isinstance(owner, torch.nn.Module) else []
    tensors = [
        (tensor, tensor.detach().clone())
        for module in modules
        for tensor in module._buffers.values()
        if tensor is not None and not is_traceable_wrapper_subclass(tensor)
    ]
    attributes = [(module, _attributes(module)) for module in modules]
    python_random = random.getstate()
    if isinstance(owner, torch.nn.Module):
        owner._compiled_call_impl = None  # what `owner.compile(...)` made: a call would lead to its backend
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_random)
        for module, saved in attributes:
            module.__dict__.clear()
            module.__dict__.update(saved)
        with torch.no_grad():
            for tensor, value in tensors:
                # By value: batch_norm updates its statistics without a new version. Not without need: a
                # graph that has saved the tensor for its backward would be spoilt.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """A copy of the module's attributes, in which later changes of its dicts do not show."""
    return {
        name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
        for name, value in module.__dict__.items()
    }
