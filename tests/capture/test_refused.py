"""What is left to plain Dynamo: the reasons, and that the answer is eager's whatever the pass does."""

# ruff: noqa: E501 (a reason is one line)
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from tests.capture import refused
from tests.capture.harness import Compiled, absorb, drop_markers


def arguments(*ids: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(len(ids), 6), torch.tensor(ids), torch.randn(refused.E, 6, 6)


def reasons(functions: list[Callable[..., Any]]) -> str:
    """The reasons for which functions are refused although the pass absorbs everything it is given."""
    lines = []
    for function in functions:
        torch._dynamo.reset()
        compiled = Compiled(function, absorb)
        with contextlib.suppress(
            Exception
        ):  # plain Dynamo stops at most of them: fullgraph=True makes it an error
            compiled(*arguments(0, 1, 2, 3, 2, 1))
        texts = [reason.split(": ", 1)[1] for reason in compiled.reasons]
        lines.append(f"{function.__name__}: {' / '.join(texts) or 'no reason'}")
    return "\n".join(lines)


class Reasons(expecttest.TestCase):
    maxDiff = None

    def test_loops(self) -> None:
        self.assertExpectedInline(
            reasons(refused.LOOPS),
            """\
counts_iterations: the loop over `hits_of(ids).nonzero()` was not captured: line 31: `hits` is changed there, and it is not a tensor that keeps its shape and dtype
counts_iterations_in_a_tensor: the loop over `hits_of(ids).nonzero()` was not captured: `hits_1` may do something for an expert that was not hit
scales_the_rest: the loop over `hits_of(ids).nonzero()` was not captured: line 49: `scale` is set here and read elsewhere
enumerates: the list of experts that were hit was not captured: it is used other than by a `for` statement over the list itself
breaks: the loop over `hits_of(ids).nonzero()` was not captured: line 67: `break` leaves the straight path
has_else: the loop over `hits_of(ids).nonzero()` was not captured: the loop has an `else`
returns_inside: the loop over `hits_of(ids).nonzero()` was not captured: line 87: `return out` leaves the straight path
reads_the_length: the loop over `hit_experts` was not captured: `hit_experts` is not just the list of the experts that were hit, read here alone
lists_twice_before: the loop over `hit.nonzero()` was not captured: the list is made twice, so its length may be used elsewhere
lists_twice_after: the loop over `hit.nonzero()` was not captured: the list is made twice, so its length may be used elsewhere
reads_the_variable: the loop over `hits_of(ids).nonzero()` was not captured: line 119: the loop variable `e` is read after the loop
sets_an_attribute: the loop over `hits_of(ids).nonzero()` was not captured: line 130: `log.calls` is changed
calls_what_sets_an_attribute: the loop over `hits_of(ids).nonzero()` was not captured: `log.calls = log.calls + 1` changes an object
calls_what_fills_a_list: the loop over `hits_of(ids).nonzero()` was not captured: `notes.append(1)` changes an object
calls_what_counts: the loop over `hits_of(ids).nonzero()` was not captured: `calls += 1` changes an object
fills_a_list_of_lists: the loop over `hits_of(ids).nonzero()` was not captured: `state["notes"].append(1)` changes an object
stacks: the loop over `hits_of(ids).nonzero()` was not captured: line 190: the list `outs` is read by more than `torch.cat`
fills_a_dict: the loop over `hits_of(ids).nonzero().flatten().tolist()` was not captured: line 198: `outs` is changed there, and it is not a tensor that keeps its shape and dtype
changes_dtype: the loop over `hits_of(ids).nonzero()` was not captured: line 206: `out` is changed there, and it is not a tensor that keeps its shape and dtype
prints: the loop over `hits_of(ids).nonzero()` was not captured: line 215: `print('ran one expert')` is called for its effect
comprehends: the list of experts that were hit was not captured: it is used other than by a `for` statement over the list itself
nested_list: the loop over `hits_of(ids).nonzero().tolist()` was not captured: `hits_of(ids).nonzero().tolist()` is not just the list of the experts that were hit, read here alone
runs_the_enabled: the loop over `enabled.nonzero()` was not captured: `index_add_` may do something for an expert that was not hit
runs_the_busy: the loop over `(counts > 1).nonzero()` was not captured: `index_add_` may do something for an expert that was not hit
runs_the_next: the loop over `hits_of(ids).nonzero().flatten().tolist()` was not captured: `index_add_` may do something for an expert that was not hit
changes_the_ids: the loop over `hit.nonzero().flatten().tolist()` was not captured: `index_add_` may do something for an expert that was not hit
changes_the_mask: the loop over `hit.nonzero().flatten().tolist()` was not captured: `index_add_` may do something for an expert that was not hit
adds_for_every_token: the loop over `hits_of(ids).nonzero()` was not captured: `out_1` may do something for an expert that was not hit
writes_in_an_inner_loop: the loop over `hits_of(ids).nonzero().flatten().tolist()` was not captured: line 436: `out` is changed in a loop of its own
skips_another_round: the loop over `(mask.sum(1) > 0).nonzero()` was not captured: `index_add_` may do something for an expert that was not hit
has_no_weight_for_the_last: the loop over `(mask.sum(1) > 0).nonzero()` was not captured: tracing it raises IndexError (index 4 is out of bounds for dimension 0 with size 4)""",
        )

    def test_branches(self) -> None:
        self.assertExpectedInline(
            reasons(refused.BRANCHES),
            """\
raises_when_empty: the test `rows.shape[0] == 0` was not captured: without rows it runs `raise ValueError('an expert without tokens')`, which may not be what a layer without rows does
adds_when_empty: the test `rows.shape[0] == 0` was not captured: without rows it runs `out += 1`, which may not be what a layer without rows does
tests_more: the test `if rows.shape[0] == 0 and x.shape[1] > 3:` was not captured: it is not by itself the condition of an `if` statement
tests_in_an_expression: the test `part = x[rows] @ w[e] if rows.shape[0] else x[rows]` was not captured: it is not by itself the condition of an `if` statement
tests_a_threshold: no reason
counts_the_filled: the test `rows.shape[0] == 0` was not captured: line 287: `filled` is changed there, and it is not a tensor that keeps its shape and dtype
moves_the_offset_too_far: the test `n == 0` was not captured: line 300: `start` is set here and read elsewhere
returns_another_value: the test `x.shape[0] == 0` was not captured: without rows it gives `torch.ones(1, w.shape[1])`, which I cannot compare with the other branch's value
returns_another_dtype: the test `x.shape[0] == 0` was not captured: without rows the value is like `x`, which differs in dtype, device or shape
returns_another_width: the test `not x.numel()` was not captured: without rows the value is like `x`, which differs in dtype, device or shape
returns_from_the_graph: the test `tokens.shape[0] == 0` was not captured: it returns from the compiled function itself
sets_another_value: the test `tokens.shape[0] == 0` was not captured: without rows it gives `tokens.new_full((1, 6), 7.0)`, which I cannot compare with the other branch's value
skips_by_a_flag: the test `flags[e].item() == 0` was not captured: `index_add_` may do something when there are no rows
skips_by_another_expert: the test `counts[e - 1] == 0` was not captured: `index_add_` may do something when there are no rows
calls_what_writes: the test `rows.numel() == 0` was not captured: `add_` changes a tensor from outside""",
        )


@pytest.mark.parametrize("function", [*refused.LOOPS, *refused.BRANCHES], ids=lambda f: f.__name__)
def test_a_careless_pass_cannot_make_them_wrong(function: Callable[..., Any]) -> None:
    """The pass here removes the markers and rewrites nothing: whatever is kept must still be eager's
    answer."""
    compiled = Compiled(function, drop_markers, fullgraph=False)
    for ids in [(0, 1, 2, 3, 2, 1), (3, 3, 1, 1, 1, 3), (2, 2, 2, 2, 2, 2)]:
        try:
            expected = function(*arguments(*ids))
        except Exception as error:
            with pytest.raises(type(error)):
                compiled(*arguments(*ids))
        else:
            torch.testing.assert_close(compiled(*arguments(*ids)), expected)
