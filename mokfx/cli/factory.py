"""`module:factory` on the command line: a function of the user's that makes a model and its inputs."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import mokfx
from mokfx.errors import MokError
from mokfx.observe import gist
from mokfx.places import place_of_frames

HELP = (
    "a function without arguments that returns (model, args) or (model, args, kwargs), as module:function or "
    "path/to/file.py:function"
)
"""Help text of an argument that names a factory."""
RETURNS = "(model, args) or (model, args, kwargs)"
_CHECK = str(Path(__file__).parent.parent / "check") + os.sep
"""Whose files watch a model while it runs: their lines are not the user's."""


_MOKFX = os.path.dirname(mokfx.__file__) + os.sep
_DEMO = f"{_MOKFX}demo"
"""Ordinary models, which happen to lie in mokfx."""


class FactoryError(MokError):
    """`module:factory` names no factory, or what it names does not do what one does."""


@dataclass(frozen=True)
class Made:
    """What a factory made: `model(*args, **kwargs)` is one call of the model."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def make(spec: str) -> Made:
    """Import a factory and call it.

    Args:
        spec: `package.module:function`, looked up from the working directory too, or `path/to/file.py:function`.

    Raises:
        FactoryError: there is no such factory, it raised, or it returned something else than a model and inputs.
    """
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise FactoryError(f"{spec!r} names no factory: write module:function, as in my_project.model:make")
    factory = _attribute(_imported(module_name), module_name, name)
    if not callable(factory):
        raise FactoryError(f"{spec} is of type {_kind(factory)}, where a function was expected that returns {RETURNS}")
    required = _required(factory)
    if required:
        raise FactoryError(
            f"{spec} takes {', '.join(required)}, but a factory takes no arguments: give each a default, or name a "
            f"function that returns {RETURNS}"
        )
    with blamed_on(spec):
        made = factory()
    return _checked(made, spec)


@contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Say in one sentence, with its line, what the user's own code raised in here.

    Raises:
        FactoryError: in place of any exception but mokfx's own, and those that a fault of mokfx is behind.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it would print a traceback before we say what it was
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except MokError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if last.startswith(_MOKFX) and not last.startswith((__file__, _CHECK, _DEMO)):
            raise
        raise FactoryError(f"{what} raised {_said(error)}{_where(error)}") from error
    finally:
        log.setLevel(level)


def _imported(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _imported_file(Path(name))
    if os.sep in name:
        raise FactoryError(f"{name!r} is neither a module nor a file: a file's name ends in .py")
    _look_in(os.getcwd())
    with blamed_on(f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # something that the module itself imports
            raise FactoryError(
                f"no module {error.name!r} is on Python's path or in {os.getcwd()}: run this from the folder that "
                f"holds it, or give the file, as in path/to/{name.rpartition('.')[2]}.py:make"
            ) from None


def _imported_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FactoryError(f"there is no file {str(path)!r} (looked from {os.getcwd()})")
    name = path.stem if path.stem not in sys.modules else f"_mokfx_{path.stem}"  # a random.py is not `random`
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # of a name that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Dynamo and dataclasses look the module of a function up
    _look_in(str(path.resolve().parent))
    with blamed_on(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


def _look_in(folder: str) -> None:
    """Put a folder on the path for good: the model may import more when it runs.

    A console script's path, unlike that of `python -m`, does not begin with the working directory.
    """
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()


def _attribute(module: ModuleType, module_name: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            functions = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
            hint = f"; did you mean {close[0]}?" if close else f"; its functions: {', '.join(functions) or 'none'}"
            raise FactoryError(f"{module_name} has no {name!r}{hint}")
        found = getattr(found, part)
    return found


def _required(factory: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin without one: calling it will tell
        return []
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _checked(made: Any, spec: str) -> Made:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        found = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a value of type {_kind(made)}"
        raise FactoryError(f"{spec} returned {found}, expected {RETURNS}")
    model, args, *rest = made
    kwargs = rest[0] if rest else {}
    for what, value, good, expected in (
        ("model", model, callable(model), "a module or a function"),
        ("args", args, isinstance(args, tuple | list), "a tuple; for one input write (x,)"),
        ("kwargs", kwargs, isinstance(kwargs, dict), "a dict"),
    ):
        if not good:
            raise FactoryError(f"{spec} returned {what} of type {_kind(value)}, expected {expected}")
    return Made(model, tuple(args), dict(kwargs))


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _said(error: BaseException) -> str:
    """An exception's type and the first line of what it says; of what Dynamo wraps another's in, that one."""
    error = getattr(error, "inner_exception", error)
    said = str(error).strip()
    reason = gist(said).rpartition("): got ")[2] if said else ""
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f" ({os.path.basename(error.filename)}:{error.lineno})"
    frames = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    ours = ("<frozen", importlib.__file__, _MOKFX)
    own = [f for f in frames if f.filename.startswith(_DEMO) or not f.filename.startswith(ours)]
    where, code = place_of_frames(own)
    return f" (at {where} `{code}`)" if code else f" (at {where})" if where else ""
