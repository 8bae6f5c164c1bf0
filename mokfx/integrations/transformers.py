"""Hugging Face transformers: expert parallelism without a branch on data, and hooks in place before the first call.

    import mokfx.integrations.transformers
    config = DistributedConfig(ep_size=8, ep_implementation="mok")
    model = AutoModelForCausalLM.from_pretrained(..., distributed_config=config)
    compiled = torch.compile(model, backend="mok", fullgraph=True)

`mokfx.compile` needs neither line: it gives a model that was distributed with "all_to_all", or with "auto", the
implementation "mok".
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import AllToAllEP, AutoEP, EPImplementationInterface
from transformers.utils.output_capturing import maybe_install_capturing_hooks

NAME = "mok"
"""What `DistributedConfig.ep_implementation` calls `BranchFreeEP`."""


class BranchFreeEP(AllToAllEP):
    """The exchange of "all_to_all" without its test for a rank that receives no token, which ends a captured graph.

    Without rows that one runs an expert on a row of zeros, so that a backward pass goes through the exchange on this
    rank too. In a graph it does so anyway, and uncompiled this is "all_to_all".
    """

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [T, H].

        Args:
            hidden_states: [T, H], this rank's tokens.
            top_k_index: [T, k], experts of all ranks.
            top_k_weights: [T, k].
        """
        if not torch.compiler.is_compiling():
            output: Tensor = super().__call__(hidden_states, top_k_index, top_k_weights)
            return output
        tokens, expert_ids, weights, state = self._dispatch_tokens(hidden_states, top_k_index, top_k_weights)
        combined: Tensor = self._combine_tokens(self.experts_forward(tokens, expert_ids, weights), state)
        return combined


EPImplementationInterface.register(NAME, BranchFreeEP)


def prepare(model: Any) -> None:
    """Have the models in `model` captured whole: hooks that record router logits, experts that exchange tokens."""
    model = getattr(model, "__self__", model)  # of a method
    if not isinstance(model, nn.Module):
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # Else the first call puts them in place, under a lock, and a graph ends there.
            maybe_install_capturing_hooks(module)
        for implementation in _implementations(module):
            # Only the method differs: what the package built it with stays.
            implementation.__class__ = BranchFreeEP


def _implementations(module: nn.Module) -> Iterator[AllToAllEP]:
    """What exchanges the tokens of a module's experts, which the package keeps in the closure of its forward."""
    forward = vars(module).get("forward")
    if not inspect.isfunction(forward):
        return
    found = inspect.getclosurevars(forward).nonlocals.get("implementation")
    if isinstance(found, AutoEP):
        found = found.all_to_all
    if type(found) is AllToAllEP:
        yield found
