"""What would be lost if a run of statements were skipped: the syntactic half of the proof that skipping is
harmless.

The tensors that the statements make are the other half: the pass must have absorbed all of them (see
proof.py). Here we make sure that nothing else comes out: a local name that is read later must be a tensor
updated in place or by an indexed add, a list that only `torch.cat` reads, or a running offset that an empty
expert does not move."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from mokfx.capture.source import Function, Lines, lines_of, names

INDEXED_ADDS = {"index_add", "scatter_add", "index_put"}


@dataclass(frozen=True)
class Evidence:
    """A statement that is harmless only if it updates a tensor: the graph must hold such a node from these
    lines."""

    lines: Lines
    targets: frozenset[str]
    what: str


@dataclass
class Effects:
    """What a run of skipped statements would change."""

    lines: Lines
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line, one sentence each) for what may change the model's state or values."""
    evidence: list[Evidence] = field(default_factory=list)


def effects_of(
    fn: Function, body: list[ast.stmt], *, loop: ast.For | None = None, count: str = "", returns: bool = False
) -> Effects:
    """Studies `body`, statements of `fn` that do not run for an empty expert.

    loop: the `for` whose whole body this is, if it is one: its variable must not be read afterwards either.
    count: the name whose being 0 skips the statements, if it is a plain name.
    returns: the statements are the rest of the function, so its locals end with them and `return` is allowed.
    """
    study = _Study(fn, body, loop, count, returns)
    study.run()
    return study.found


class _Study:
    def __init__(
        self, fn: Function, body: list[ast.stmt], loop: ast.For | None, count: str, returns: bool
    ) -> None:
        self.fn, self.body, self.loop, self.count, self.returns = fn, body, loop, count, returns
        self.found = Effects(lines_of(fn.filename, body))
        self.stored = {n.id for statement in body for n in names(statement, ast.Store)}
        inside = [node for statement in ([loop] if loop else body) for node in ast.walk(statement)]
        self.skipped = {id(node) for node in inside if isinstance(node, ast.stmt | ast.Name)}
        self.parents = {id(child): node for node in ast.walk(fn.tree) for child in ast.iter_child_nodes(node)}
        self.inner_loops = 0
        self.defined: set[str] = set()
        self.carried: set[str] = set()

    def run(self) -> None:
        if self.loop is not None:
            self.defined |= {n.id for n in names(self.loop.target, ast.Store)}
            for name in sorted(self.defined):
                if self.read_outside(name):
                    self.problem(self.loop, f"the loop variable `{name}` is read after the loop")
        self.order(self.body)
        self.visit(self.body)

    def problem(self, at: ast.stmt | ast.expr, text: str) -> None:
        self.found.problems.append((at.lineno, text))

    def needs(self, statement: ast.stmt, what: str, *targets: str) -> None:
        self.once(statement, what)
        lines = lines_of(self.fn.filename, [statement])
        self.found.evidence.append(Evidence(lines, frozenset(targets), what))

    def once(self, statement: ast.stmt, what: str) -> None:
        """What changes must do so once for each expert: the i-th node of the line is then the i-th
        expert's."""
        if self.inner_loops:
            self.problem(statement, f"`{what}` is changed in a loop of its own")

    # Which names outlive the statements.

    def live(self, name: str) -> bool:
        return name in self.carried or (not self.returns and self.read_outside(name))

    def read_outside(self, name: str) -> bool:
        loads = [n for n in names(self.fn.tree, ast.Load) if n.id == name and id(n) not in self.skipped]
        return any(self.set_before(load, name) is None for load in loads)

    def set_before(self, load: ast.AST, name: str) -> ast.stmt | None:
        """The statement outside, after the skipped ones, that always sets what a read outside sees; None if
        there is none."""
        node = load
        while (parent := self.parents.get(id(node))) is not None:
            if isinstance(parent, ast.For) and node in parent.body and _sets(parent.target, name):
                return parent
            for block in (getattr(parent, part, None) for part in ("body", "orelse", "finalbody")):
                if not isinstance(block, list) or node not in block:
                    continue
                for earlier in reversed(block[: block.index(node)]):
                    if any(id(inner) in self.skipped for inner in ast.walk(earlier)):
                        return None
                    if isinstance(earlier, ast.Assign) and any(_sets(t, name) for t in earlier.targets):
                        return earlier
            node = parent
        return None

    def order(self, statements: list[ast.stmt]) -> None:
        """Fills `carried`: names read here before they are set here, whose value came from the iteration
        before."""
        for statement in statements:
            if isinstance(statement, ast.If):
                self.reads(statement.test)
                before = set(self.defined)
                self.order(statement.body)
                after = self.defined
                self.defined = set(before)
                self.order(statement.orelse)
                self.defined &= after
            elif isinstance(statement, ast.For):
                self.reads(statement.iter)
                before = set(self.defined)
                self.defined |= {n.id for n in names(statement.target, ast.Store)}
                self.order(statement.body)
                self.defined = before
            elif isinstance(statement, ast.With):
                for item in statement.items:
                    self.reads(item.context_expr)
                    if item.optional_vars is not None:
                        self.defined |= {n.id for n in names(item.optional_vars, ast.Store)}
                self.order(statement.body)
            else:
                self.reads(statement)
                if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                    if statement.target.id not in self.defined:
                        self.carried.add(statement.target.id)
                else:
                    self.defined |= {n.id for n in names(statement, ast.Store)}

    def reads(self, tree: ast.AST) -> None:
        self.carried |= {n.id for n in names(tree, ast.Load) if n.id in self.stored - self.defined}

    # What each statement does.

    def visit(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.If():
                    self.visit(statement.body)
                    self.visit(statement.orelse)
                case ast.For(orelse=[]) | ast.With():
                    for bound in _bound(statement):
                        for name in names(bound, ast.Store):
                            if self.live(name.id):
                                self.problem(statement, f"`{name.id}` is set here and read elsewhere")
                    self.inner_loops += isinstance(statement, ast.For)
                    self.visit(statement.body)
                    self.inner_loops -= isinstance(statement, ast.For)
                case ast.Assign(targets=targets):
                    for target in targets:
                        self.assign(statement, target)
                case ast.AnnAssign(target=target, value=ast.expr()):
                    self.assign(statement, target)
                case ast.AugAssign():
                    self.update(statement)
                case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Continue() | ast.Assert():
                    pass
                case ast.Expr(value=ast.Call() as call):
                    self.call(statement, call)
                case ast.Return() if self.returns:
                    pass
                case _:
                    self.problem(statement, f"`{_first_line(statement)}` leaves the straight path")
            for inner in (
                ast.walk(statement) if not isinstance(statement, ast.If | ast.For | ast.With) else ()
            ):
                if isinstance(inner, ast.NamedExpr | ast.Yield | ast.YieldFrom | ast.Await):
                    self.problem(inner, f"`{ast.unparse(inner)}` does more than compute a value")

    def assign(self, statement: ast.Assign | ast.AnnAssign, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self.assign(statement, element)
        elif isinstance(target, ast.Subscript):
            self.needs(statement, ast.unparse(target.value), "setitem")
        elif not isinstance(target, ast.Name):
            self.problem(statement, f"`{ast.unparse(target)}` is changed")
        elif self.live(target.id):
            name, value = target.id, statement.value
            if isinstance(value, ast.Name) and self.is_offset(name, value.id):
                return
            match value:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=base), attr=method), args=arguments) if (
                    method in INDEXED_ADDS
                    and (base == name or (base == "torch" and arguments and _is(arguments[0], name)))
                ):
                    self.needs(statement, name, method)
                case ast.BinOp(left=left, op=ast.Add(), right=right) if _is(left, name) or _is(right, name):
                    self.needs(statement, name, "add")
                case _:
                    self.problem(statement, f"`{name}` is set here and read elsewhere")

    def update(self, statement: ast.AugAssign) -> None:
        target = statement.target
        if isinstance(target, ast.Subscript):
            self.needs(statement, ast.unparse(target.value), "setitem")
        elif not isinstance(target, ast.Name):
            self.problem(statement, f"`{ast.unparse(target)}` is changed")
        elif self.live(target.id):
            moved_by = statement.value.id if isinstance(statement.value, ast.Name) else ""
            if not isinstance(statement.op, ast.Add):
                self.problem(statement, f"`{target.id}` is changed here and read elsewhere")
            elif not (moved_by and moved_by == self.count):
                self.needs(statement, target.id, "iadd")

    def call(self, statement: ast.Expr, call: ast.Call) -> None:
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr="append"):
                self.once(statement, name)
                if not self.only_concatenated(name):
                    self.problem(statement, f"the list `{name}` is read by more than `torch.cat`")
            case ast.Attribute(attr=method) if method.endswith("_") and not method.endswith("__"):
                self.needs(statement, ast.unparse(call.func.value), method)
            case _:
                self.problem(statement, f"`{_first_line(statement)}` is called for its effect")

    def is_offset(self, name: str, end: str) -> bool:
        """`start = end`, where `end = start + count`: an expert with a count of 0 leaves `start` where it
        was."""
        sums = [value for _, value in self.fn.values(end) if isinstance(value, ast.BinOp)]
        return bool(
            self.count
            and len(self.fn.stores(end)) == len(sums) == 1
            and isinstance(sums[0].op, ast.Add)
            and {ast.unparse(sums[0].left), ast.unparse(sums[0].right)} == {name, self.count}
        )

    def only_concatenated(self, name: str) -> bool:
        """Whether a local list starts as `[]` and is read by nothing but `torch.cat` (and a test that it is
        not empty, with zero rows in the other branch): then a piece with zero rows is no piece."""
        starts = [(at, value) for at, value in self.fn.values(name) if isinstance(value, ast.List)]
        if len(starts) != 1 or starts[0][1].elts:
            return False
        start = starts[0][0]
        return all(
            self.is_cat_or_test(load) or self.is_reset(load, name, start) for load in self.fn.loads(name)
        )

    def is_reset(self, load: ast.Name, name: str, start: ast.stmt) -> bool:
        """Whether a read sees another value than the list: `outs = torch.cat(outs)` before it."""
        return (setter := self.set_before(load, name)) is not None and setter is not start

    def is_cat_or_test(self, load: ast.Name) -> bool:
        parent = self.parents[id(load)]
        match parent:
            case ast.Attribute(attr="append"):
                return isinstance(self.parents[id(parent)], ast.Call)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="cat" | "concat" | "concatenate")
            ):
                return load is parent.args[0]
            case ast.Call(func=ast.Name(id="len")):
                around = self.parents[id(parent)]
                return isinstance(around, ast.IfExp) and around.test is parent and _has_no_rows(around.orelse)
            case ast.IfExp(test=test, orelse=other):
                return test is load and _has_no_rows(other)
        return False


def _has_no_rows(value: ast.expr) -> bool:
    match value:
        case ast.Call(
            func=ast.Attribute(attr="new_empty" | "new_zeros" | "empty" | "zeros"), args=[first, *_]
        ):
            shape = first.elts[0] if isinstance(first, ast.Tuple | ast.List) and first.elts else first
            return isinstance(shape, ast.Constant) and shape.value == 0
    return False


def _bound(statement: ast.For | ast.With) -> list[ast.expr]:
    """What a `for` or a `with` sets by itself."""
    if isinstance(statement, ast.For):
        return [statement.target]
    return [item.optional_vars for item in statement.items if item.optional_vars is not None]


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _sets(target: ast.expr, name: str) -> bool:
    return any(n.id == name for n in names(target, ast.Store))


def _first_line(statement: ast.stmt) -> str:
    return ast.unparse(statement).split("\n")[0]
