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
from mokfx.observe import act_on_misses, artifact, forget_warnings, publish, rewrite_and_report
from mokfx.options import MokOptions, split_options
from mokfx.report import readable


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
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo's.

        Raises:
            OptionError: `mode` or `options` is not understood.
            MissError: something was left alone and `mok.on_miss` is "raise".
        """
        own, patches = split_options(mode, options)
        if own.enabled:
            artifact("mok_before_rewrite", lambda: readable(gm))
            report = rewrite_and_report(gm, own.provider)
            artifact("mok_after_rewrite", lambda: readable(gm))
            publish(report)
            act_on_misses(report.misses, own.on_miss)
        if holds_mok_op(gm):
            patches = salted(patches, _salt(own))
        return _compile_rest(gm, example_inputs, own.compiler, patches)

    def reset(self) -> None:
        """For `torch._dynamo.reset`: forget the CUDA graphs, and which misses were warned of."""
        forget_warnings()
        if trees := sys.modules.get("torch._inductor.cudagraph_trees"):
            trees.reset_cudagraph_trees()


mok = MokBackend()


def _salt(own: MokOptions) -> str:
    from mokfx.ops import fingerprint

    return f"{fingerprint()} provider={own.provider}"


def _compile_rest(
    gm: GraphModule, example_inputs: Sequence[Any], compiler: str, patches: dict[str, Any]
) -> Callable[..., Any]:
    if compiler != "inductor":
        return lookup_backend(compiler)(gm, list(example_inputs))
    from torch._inductor.compile_fx import compile_fx

    # As patches and not as a context, because the backward is compiled after this function has returned.
    return cast("Callable[..., Any]", compile_fx(gm, example_inputs, config_patches=patches))
