"""Answers the questions at which Dynamo stops: a number that only the data knows, needed while tracing.

Three questions have an answer, each with what keeps it honest:

* the length of `torch.bincount(ids, minlength=E)`: E, with a run-time assertion, since only an id >= E makes
  it longer;
* the length of a list of hit experts that a `for` runs over: all of them, and row i is expert i (marker,
  proof);
* whether there are rows, as the condition of an `if`: yes (marker, proof).

Any other question stays Dynamo's own.
"""

from __future__ import annotations

import ast
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Graph, Node, Proxy
from torch.utils._sympy.symbol import SymT, symbol_is_type

from mokfx.capture.chosen import below, counted_of
from mokfx.capture.emptiness import empty_test, rows_asked
from mokfx.capture.graph import maker_of, number_node, op_name, value_of
from mokfx.capture.hits import UnknownValue, hit_list, known, real
from mokfx.capture.markers import EVERY_EXPERT, NONEMPTY
from mokfx.capture.plan import Plan, Refused, plan_branch, plan_loop
from mokfx.capture.source import Site, function_of
from mokfx.capture.trace import Assumption, Moment, Trace, objects_in_reach

if TYPE_CHECKING:
    from mokfx.capture.session import Capture

NO_LOOP = "it is used other than by a `for` statement over the list itself"
TORCH = os.path.dirname(torch.__file__)


def answer(session: Capture, trace: Trace, translator: Any, question: sympy.Basic) -> sympy.Basic | None:
    """The answer to a question that tracing `translator`'s current instruction needs; None leaves it to
    Dynamo."""
    oracle = _Oracle(session, trace, translator)
    numbers = {}
    for symbol in question.free_symbols:
        number = oracle.number(symbol)
        if number is not None:
            numbers[symbol] = number
    rest = question.subs(numbers)
    if not rest.free_symbols:
        return rest
    return oracle.rows(rest) if rest == question else None


def _is_torch(translator: Any) -> bool:
    return bool(translator.f_code.co_filename.startswith(TORCH))


def is_list_length(translator: Any, question: sympy.Basic) -> bool:
    """Whether a question that got no answer is about the length of a list of hit experts, or of a
    bincount."""
    makers = [
        maker_of(tracer.graph, symbol)
        for tracer in translator.output.tracers
        for symbol in question.free_symbols
    ]
    return any(m is not None and (op_name(m) == "bincount" or hit_list(m) is not None) for m in makers)


class _Oracle:
    def __init__(self, session: Capture, trace: Trace, translator: Any) -> None:
        self.session, self.trace = session, trace
        self.in_torch = _is_torch(translator)
        while translator.parent and _is_torch(translator):
            translator = translator.parent
        self.translator = translator
        self.output = translator.output
        self.graph: Graph = self.output.graph
        self.instruction = translator.current_instruction
        self.jumps = self.instruction.opname.startswith("POP_JUMP")

    def number(self, symbol: sympy.Basic) -> int | None:
        maker = self.maker(symbol)
        if maker is None:
            return None
        if op_name(maker) == "bincount":
            return self.bincount(maker, symbol)
        if (hit := hit_list(maker)) is not None:
            num_experts = self.length(hit)
            return None if self.jumps or num_experts is None else self.loop(maker, hit, num_experts)
        try:
            value = known(maker, self.trace.hit_lists)
        except UnknownValue:
            return None
        if isinstance(
            value, torch.Tensor
        ):  # read by an index: the number has no node of its own, and needs none
            value_of(maker).item_memo = None
            self.output.shape_env.pending_fresh_unbacked_symbols.remove(symbol)
        return real(int, value)

    def maker(self, symbol: sympy.Basic) -> Node | None:
        makers = (maker_of(tracer.graph, symbol) for tracer in self.output.tracers)
        return next((maker for maker in makers if maker is not None), None)

    def length(self, hit: Node) -> int | None:
        """The number of experts that a hit vector is about, if it is known: also that of a bincount.

        A mask may have room for one more than there are, for slots that another rank has; no round is traced
        for one that no id can name, whose weights do not exist.
        """
        size = value_of(hit).shape[0]
        if isinstance(size, int):
            ids = counted_of(hit)
            most = below(ids) if ids is not None else None
            return size if most is None else min(size, most)
        if isinstance(size.node.expr, sympy.Integer):
            return int(size.node.expr)
        maker = self.maker(size.node.expr)
        return self.bincount(maker, size.node.expr) if maker and op_name(maker) == "bincount" else None

    def bincount(self, maker: Node, symbol: sympy.Basic) -> int | None:
        length = maker.kwargs.get("minlength", maker.args[2] if len(maker.args) > 2 else None)
        if type(length) is not int or length < 1:
            return None
        site = Site(self.translator.f_code.co_filename, self.instruction.positions.lineno)
        message = f"{site.where}: torch.bincount met an id that is not below its minlength={length}"
        self.output.shape_env.guard_or_defer_runtime_assert(sympy.Eq(symbol, length), message)
        self.trace.lengths[str(symbol)] = message
        return length

    def loop(self, maker: Node, hit: Node, num_experts: int) -> int | None:
        fn = function_of(self.translator.f_code)
        loop = fn.find_loop(self.instruction.positions) if fn else None
        line = loop.lineno if loop else self.instruction.positions.lineno
        site = Site(self.translator.f_code.co_filename, line)
        if self.in_torch:  # Dynamo's own code for `enumerate`, say
            loop = None
        what = f"the loop over `{ast.unparse(loop.iter)}`" if loop else "the list of experts that were hit"
        if self.session.gave_up(site, "loop"):
            return None
        if maker in self.trace.hit_lists:
            return num_experts if (site, "loop") in self.trace.assumptions else None
        try:
            if fn is None:
                raise Refused(
                    "the source of this function is not at hand (generated code, a lambda, a comprehension)"
                )
            if loop is None:
                raise Refused(NO_LOOP)
            if sum(hit_list(user) is not None for user in hit.users) != 1:
                raise Refused("the list is made twice, so its length may be used elsewhere")
            plan = plan_loop(fn, loop)
        except Refused as refusal:
            self.session.refuse(site, "loop", f"{what} was not captured: {refusal}", maker.name)
            return None
        self.trace.hit_lists[maker] = num_experts
        self.note(site, "loop", what, plan, None, num_experts).lists[maker] = num_experts
        rows = maker
        if isinstance(value_of(maker), tuple):
            rows = next(user for user in maker.users if op_name(user) == "getitem")
        self.mark(EVERY_EXPERT, (hit, rows, num_experts, site.where))
        return num_experts

    def rows(self, question: sympy.Basic) -> sympy.Basic | None:
        asked = rows_asked(question)
        if asked is None or not self.jumps or self.in_torch:
            return None
        measured, value = asked
        size = _rows_in(measured)
        fn = function_of(self.translator.f_code)
        statement = fn.find_if(self.instruction.positions) if fn else None
        line = statement.lineno if statement else self.instruction.positions.lineno
        site = Site(self.translator.f_code.co_filename, line)
        if self.session.gave_up(site, "branch"):
            return None
        what = f"the test `{ast.unparse(statement.test) if statement else site.code}`"
        node = number_node(self.graph, size) or number_node(self.graph, measured)
        try:
            if fn is None:
                raise Refused(
                    "the source of this function is not at hand (generated code, a lambda, a comprehension)"
                )
            test = empty_test(statement) if statement else None
            if statement is None or test is None:
                raise Refused("it is not by itself the condition of an `if` statement")
            if node is None:
                raise Refused(f"no number in the graph is the size {size}")
            known_plan = self.trace.assumptions.get((site, "branch"))
            plan = known_plan.plan if known_plan else plan_branch(fn, statement, test)
            self.note(site, "branch", what, plan, size)
        except Refused as refusal:
            self.session.refuse(
                site, "branch", f"{what} was not captured: {refusal}", node.name if node else ""
            )
            return None
        self.mark(NONEMPTY, (node, site.where))
        return sympy.true if value else sympy.false

    def note(
        self, site: Site, kind: str, subject: str, plan: Plan, size: sympy.Basic | None, times: int = 1
    ) -> Assumption:
        moment = Moment(self.translator, size)
        local = self.translator.symbolic_locals
        for name in plan.floating:
            value = _fake(local.get(name))
            if value is None or not value.is_floating_point():
                raise Refused(f"`{name}` is not a floating-point tensor")
        if plan.same_as:
            value = _fake(local.get(plan.same_as))
            if value is None:
                raise Refused(f"`{plan.same_as}` is not a tensor")
            moment = replace(moment, like=value)
        if plan.result == "return" and self.translator.parent is None:
            raise Refused("it returns from the compiled function itself")
        assumption = self.trace.assumptions.get((site, kind))
        if assumption is None:
            assumption = Assumption(site, kind, subject, plan, old=objects_in_reach(self.translator))
            self.trace.assumptions[site, kind] = assumption
        assumption.moments.append(moment)
        assumption.times += times
        return assumption

    def mark(self, marker: Any, arguments: tuple[Any, ...]) -> None:
        """Adds a marker to the graph, here."""
        tracer = self.output.current_tracer
        proxies = tuple(Proxy(a, tracer) if isinstance(a, Node) else a for a in arguments)
        proxy = self.output.create_proxy("call_function", marker, proxies, {})
        proxy.node.meta["example_value"] = None


def _rows_in(size: sympy.Basic) -> sympy.Basic:
    """The number of rows in a number of elements: the factor that only the data knows (6*u0 -> u0)."""
    unknown = [
        f
        for f in sympy.Mul.make_args(size)
        if any(symbol_is_type(s, SymT.UNBACKED_INT) for s in f.free_symbols)
    ]
    return unknown[0] if len(unknown) == 1 and isinstance(size, sympy.Mul) else size


def _fake(variable: Any) -> torch.Tensor | None:
    """The fake tensor behind a Dynamo variable."""
    try:
        value = value_of(variable.as_proxy().node)
    except (AttributeError, NotImplementedError):
        return None
    return value if isinstance(value, torch.Tensor) else None


def known_number(trace: Trace, variable: Any) -> int | bool | None:
    """The expert's number that a Dynamo number stands for, in a loop over a list of hit experts; None for any
    other."""
    if not trace.hit_lists:
        return None
    try:
        value = known(variable.as_proxy().node, trace.hit_lists)
    except UnknownValue:
        return None
    return value if isinstance(value, int) else None


def known_verdict(trace: Trace, translator: Any, left: Any, right: Any, op: str) -> bool | None:
    """The value of `expert == 3` in an `if`, where the tensor `expert` is a row of a list that a loop runs
    over.

    None leaves the comparison a tensor: its value is not known, or it is not what the next jump tests.
    """
    following = translator.next_instruction
    if not trace.hit_lists or not (following and following.opname.startswith(("POP_JUMP", "TO_BOOL"))):
        return None
    try:
        mine = known(left.as_proxy().node, trace.hit_lists)
        other = right.as_proxy()
        other = known(other.node if isinstance(other, Proxy) else other, trace.hit_lists)
    except (UnknownValue, NotImplementedError):
        return None
    verdict = real(getattr(mine, op), other)
    if not isinstance(verdict, torch.Tensor) or verdict.numel() != 1:
        return None
    if real(bool, verdict):
        _note_skip(trace, translator, left.as_proxy().node, mine)
    return real(bool, verdict)


def _note_skip(trace: Trace, translator: Any, row: Node, expert: torch.Tensor) -> None:
    """Notes that this round of a loop ends here, for `if expert == num_experts: continue`."""
    fn = function_of(translator.f_code)
    line = translator.current_instruction.positions.lineno
    tests = [n for n in ast.walk(fn.tree) if isinstance(n, ast.If) and n.lineno == line] if fn else []
    if (
        len(tests) != 1
        or not isinstance(tests[0].test, ast.Compare)
        or not isinstance(tests[0].body[0], ast.Continue)
    ):
        return
    while row not in trace.hit_lists:
        row = row.all_input_nodes[0]
    for assumption in trace.assumptions.values():
        if row in assumption.lists:
            assumption.skips[row, real(int, expert)] = line
