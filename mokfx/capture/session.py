"""The scope in which Dynamo may be answered, and its memory between attempts.

What is changed in torch, only inside `substitutions(...)`, only for the thread that entered it, and put back
at its end: `ShapeEnv.evaluate_sym_node` (asked when a number that only the data knows is needed),
`SymNodeVariable.create` and `TensorVariable.richcompare_impl` (so that the expert's number, and `if expert ==
3`, are plain Python values in a loop over hit experts), and `InstructionTranslatorBase.run` (an error met under an
assumption is one more reason to go without it). There is no public hook at these places:
`torch.compiler.substitute_in_graph` is global and sees functions, not branches, loops or methods; a
TorchFunctionMode, which Dynamo does trace, sees no branch or loop either and puts its own frame into every
node's source line."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError, unimplemented
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from mokfx.capture.oracle import answer, is_list_length, known_number, known_verdict
from mokfx.capture.source import Site
from mokfx.capture.trace import Trace
from mokfx.capture.unproven import Unproven
from mokfx.passes.outcome import Miss


class Capture:
    """What is known about one compiled model's speculations: those given up, and why."""

    def __init__(self) -> None:
        self.misses: list[Miss] = []
        """Each line that was left to plain Dynamo, with the reason; ready for the report."""
        self._given_up: set[tuple[Site, str]] = set()
        self._output: weakref.ref[Any] | None = None
        self._trace = Trace()

    def gave_up(self, site: Site, kind: str) -> bool:
        """Whether a speculation ("loop" or "branch") at a line is not to be made (again)."""
        return (site, kind) in self._given_up

    def refuse(self, site: Site, kind: str, reason: str, node: str) -> None:
        """Leaves a line to plain Dynamo from now on, with the reason for the report."""
        if not self.gave_up(site, kind):
            self._given_up.add((site, kind))
            self.misses.append(Miss(reason, site.where, site.code, node))

    def trace(self, output_graph: Any) -> Trace:
        """The record of the output graph that Dynamo is writing; another graph starts a new one."""
        if self._output is None or self._output() is not output_graph:
            self._output, self._trace = weakref.ref(output_graph), Trace()
        return self._trace


class _Active(threading.local):
    session: Capture | None = None


_active = _Active()
_lock = threading.Lock()
_entered = 0


@contextlib.contextmanager
def substitutions(session: Capture | None = None) -> Iterator[Capture]:
    """Lets Dynamo capture, in this thread, the lines that `mokfx.capture` describes.

    Enter it around each call of a compiled function whose backend runs its pass inside `proving(gm)`. Without
    that the graphs are still never wrong, but they raise where a speculation does not hold. Give the same
    session for each call of the same compiled function (a fresh one otherwise): it remembers which lines
    could not be proven."""
    session = session or Capture()
    before, _active.session = _active.session, session
    _patch()
    try:
        yield session
    finally:
        _unpatch()
        _active.session = before


def active() -> tuple[Capture, Trace, Any] | None:
    """(session, trace, Dynamo's translator) of the frame that this thread is tracing inside a scope."""
    if _active.session is None:
        return None
    try:
        root = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is being traced
        return None
    return _active.session, _active.session.trace(root.output), root.output.current_tx


def _patch() -> None:
    global _entered
    with _lock:
        _entered += 1
        if _entered == 1:
            for (owner, name), replacement in _REPLACEMENTS.items():
                _originals[owner, name] = vars(owner)[name]
                setattr(owner, name, replacement)


def _unpatch() -> None:
    global _entered
    with _lock:
        _entered -= 1
        if _entered == 0:
            for (owner, name), original in _originals.items():
                setattr(owner, name, original)


def _tracing() -> tuple[Capture, Trace, Any] | None:
    now = active()
    return None if now is None or now[1].closed else now


def _evaluate_sym_node(self: ShapeEnv, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return _originals[ShapeEnv, "evaluate_sym_node"](self, sym_node, *args, **kwargs)
    except GuardOnDataDependentSymNode:
        now = _tracing()
        if now is None or now[2].output.shape_env is not self:
            raise
        session, trace, translator = now
        value = answer(session, trace, translator, sym_node.expr)
        if value is not None:
            return value
        if is_list_length(translator, sym_node.expr):
            # Asked inside an op (a `tolist`), where Dynamo would fail for good: break the graph instead.
            unimplemented(
                gb_type="Length of a list that depends on data",
                context=str(sym_node.expr),
                explanation="mokfx left this line to Dynamo; mokfx.explain says why.",
                hints=[],
            )
        raise


def _create(cls: Any, /, tx: Any, proxy: Any, sym_num: Any = None, **options: Any) -> Any:
    made = _originals[SymNodeVariable, "create"].__func__(cls, tx, proxy, sym_num, **options)
    if isinstance(made, SymNodeVariable) and (now := _tracing()) is not None:
        number = known_number(now[1], made)
        if number is not None:
            return ConstantVariable.create(number)
    return made


def _richcompare(self: TensorVariable, tx: Any, other: Any, op: str) -> Any:
    if (now := _tracing()) is not None:
        verdict = known_verdict(now[1], tx, self, other, op)
        if verdict is not None:
            return ConstantVariable.create(verdict)
    return _originals[TensorVariable, "richcompare_impl"](self, tx, other, op)


def _run(self: InstructionTranslatorBase) -> None:
    try:
        _originals[InstructionTranslatorBase, "run"](self)
    except Exception as error:
        now = _tracing() if self.parent is None else None
        if now is None or not now[1].assumptions or _is_dynamos(error):
            raise
        # A round of a loop for an expert that is never hit may do what is never done. If the error is not of
        # that kind, the next attempt meets it again.
        session, trace, _ = now
        told = str(error).strip().partition("\n")[0]
        for each in trace.assumptions.values():
            reason = f"{each.subject} was not captured: tracing it raises {type(error).__name__} ({told})"
            session.refuse(each.site, each.kind, reason, "")
        raise Unproven(session.misses[-len(trace.assumptions) :]) from error


def _is_dynamos(error: Exception) -> bool:
    """Whether an exception is how Dynamo speaks to itself, and not of the code that it traces."""
    return isinstance(error, TorchDynamoException) and not isinstance(error, TorchRuntimeError)


# The originals stay here after the last scope: another thread may be about to call one.
_originals: dict[tuple[type, str], Any] = {}
_REPLACEMENTS: dict[tuple[type, str], Any] = {
    (ShapeEnv, "evaluate_sym_node"): _evaluate_sym_node,
    (SymNodeVariable, "create"): classmethod(_create),
    (TensorVariable, "richcompare_impl"): _richcompare,
    (InstructionTranslatorBase, "run"): _run,
}
