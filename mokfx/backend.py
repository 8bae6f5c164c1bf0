"""The backend `mok`: rewrite the MoE layers of each captured graph, and let Inductor compile the rest.

The graph is rewritten here, before autograd sees it, because a forward-only rewrite brings its own backward
at no later hook: after AOTAutograd, forward and backward are two graphs, each already full of the other's
saved values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from mokfx.cache import holds_mok_op, salted
from mokfx.errors import OptionError
from mokfx.observe import act_on_misses, artifact, forget_warnings, publish, rewrite_and_report
from mokfx.ops import OP, configure, fingerprint, get_provider, set_provider
from mokfx.options import split_options
from mokfx.passes.outcome import Miss
from mokfx.readable import readable


class MokBackend:
    """`torch.compile(model, backend="mok", mode=..., options=...)`."""

    __name__ = "mok"
    """What Dynamo calls the backend in its messages."""

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        refused: Sequence[Miss] = (),
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo's.

        Args:
            refused: what was left alone already when the graph was captured, for the report.

        Raises:
            OptionError: `mode` or `options` is not understood.
            MissError: something was left alone and `mok.on_miss` is "raise".
        """
        own, patches = split_options(mode, options)
        _use_provider(own.provider)
        configure(timeout_s=own.timeout_s, recompute=own.recompute)
        if own.enabled:
            artifact("mok_before_rewrite", lambda: readable(gm))
            report = rewrite_and_report(gm, refused)
            artifact("mok_after_rewrite", lambda: readable(gm))
            publish(report)
            act_on_misses(report.misses, own.on_miss)
        if has_no_tokens(gm):
            return gm.forward
        if holds_mok_op(gm):
            # None of mokfx's options changes the code that is compiled from the same rewritten graph.
            patches = salted(patches, fingerprint())
        return _compile_rest(gm, example_inputs, own.compiler, patches)

    def reset(self) -> None:
        """For `torch._dynamo.reset`: forget the CUDA graphs, and which misses were warned of."""
        forget_warnings()
        if trees := sys.modules.get("torch._inductor.cudagraph_trees"):
            trees.reset_cudagraph_trees()


def has_no_tokens(gm: GraphModule) -> bool:
    """Whether a graph was captured for a rank without tokens, in a group whose other ranks may have some.

    Such a graph is small enough to run as it is, and has to: a partitioner would save its empty activations
    where the others recompute theirs, call the op less often than they do, and leave them waiting.
    """
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    calls = (node for graph in graphs for node in graph.nodes if node.target is OP)
    exchanged = (node for node in calls if node.kwargs.get("group_name") is not None)
    tokens = (node.args[0].meta["example_value"].shape[0] for node in exchanged)
    return any(isinstance(number, int) and number == 0 for number in tokens)


mok = MokBackend()


def _use_provider(name: str) -> None:
    """Carry out `mok.provider`: a setting of the process, as a backward runs outside of any call of ours."""
    current = get_provider()
    if name in ("auto", current):
        return
    if current != "auto":
        raise OptionError(
            f"mok.provider is {name!r}, but this process runs the op by {current!r}: "
            "give every model of a process the same provider"
        )
    set_provider(name)


def _compile_rest(
    gm: GraphModule, example_inputs: Sequence[Any], compiler: str, patches: dict[str, Any]
) -> Callable[..., Any]:
    if compiler != "inductor":
        return lookup_backend(compiler)(gm, list(example_inputs))
    from torch._inductor.compile_fx import compile_fx

    # As patches and not as a context, because the backward is compiled after this function has returned.
    return cast("Callable[..., Any]", compile_fx(gm, example_inputs, config_patches=patches))
