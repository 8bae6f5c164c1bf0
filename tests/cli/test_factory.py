"""`module:factory`: what it takes, and one sentence for each mistake."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mokfx.cli.factory import FactoryError, blamed_on, make
from mokfx.errors import MokError

MODULE = """
import torch

def make(width=4):
    return torch.nn.Linear(width, 2), (torch.ones(3, width),)

def make_with_options():
    return (lambda x, *, scale: x * scale), [torch.ones(2)], {"scale": 3}

class Namespace:
    make = staticmethod(make)

def needs(hidden, *, heads): ...
def falls():
    return [1, 2][7]
def gives_model(): return torch.nn.Linear(1, 1)
def gives_four(): return 1, 2, 3, 4
def gives_tensor(): return torch.relu, torch.ones(2)
def gives_text(): return "model", ()
def gives_list(): return torch.relu, (torch.ones(2),), ["scale"]
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "factories.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize("name", ["factories:make", "factories.py:make", "factories:Namespace.make"])
def test_a_factory_is_found_in_the_working_directory(folder: Path, name: str) -> None:
    made = make(name)
    assert made.model(*made.args, **made.kwargs).shape == (3, 2)


def test_keyword_arguments(folder: Path) -> None:
    made = make("factories:make_with_options")
    assert torch.equal(made.model(*made.args, **made.kwargs), torch.full((2,), 3.0))


def test_a_module_of_a_package(folder: Path) -> None:
    (folder / "models").mkdir()
    (folder / "models" / "tiny.py").write_text("import torch\ndef make(): return torch.relu, (torch.ones(1),)")
    assert make("models.tiny:make").model is torch.relu


def test_a_file_may_import_its_neighbours_and_hide_no_module(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "beside.py").write_text("import torch\nrelu = torch.relu")
    (folder / "inner" / "random.py").write_text("import beside\ndef make(): return beside.relu, ()")
    library = sys.modules["random"]
    assert make("inner/random.py:make").model is torch.relu
    assert sys.modules["random"] is library


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("factories", "'factories' names no factory: write module:function, as in my_project.model:make"),
        ("factories:", "'factories:' names no factory"),
        (":make", "':make' names no factory"),
        ("absent:make", "no module 'absent' is on Python's path or in"),
        ("absent.model:make", "or give the file, as in path/to/model.py:make"),
        ("absent.py:make", "there is no file 'absent.py' (looked from"),
        ("some/factories:make", "'some/factories' is neither a module nor a file: a file's name ends in .py"),
        ("factories:mkae", "factories has no 'mkae'; did you mean make?"),
        ("factories:zzz", "factories has no 'zzz'; its functions: make, make_with_options, needs, falls,"),
        ("factories:number", "factories:number is of type int, where a function was expected that returns (model,"),
        ("factories:needs", "factories:needs takes hidden, heads, but a factory takes no arguments: give each"),
        ("factories:falls", "factories:falls raised IndexError: list index out of range (at factories.py:15 `return"),
        ("factories:gives_model", "returned a value of type torch.nn.modules.linear.Linear, expected (model, args)"),
        ("factories:gives_four", "factories:gives_four returned a tuple of 4, expected (model, args) or (model,"),
        ("factories:gives_tensor", "returned args of type torch.Tensor, expected a tuple; for one input write (x,)"),
        ("factories:gives_text", "returned model of type str, expected a module or a function"),
        ("factories:gives_list", "returned kwargs of type list, expected a dict"),
        ("broken:make", "importing broken raised SyntaxError"),
        ("unmet:make", "importing unmet raised ModuleNotFoundError: No module named 'nowhere' (at unmet.py:1 `import"),
        ("leaves:make", "importing leaves raised SystemExit: bye (at leaves.py:2 `sys.exit"),
    ],
)
def test_mistakes(folder: Path, name: str, says: str) -> None:
    (folder / "broken.py").write_text("def make(:\n")
    (folder / "unmet.py").write_text("import nowhere\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit('bye')\n")
    with pytest.raises(FactoryError) as raised:
        make(name)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_mokfx_raises_passes_through() -> None:
    with pytest.raises(MokError, match=r"^as it was$"), blamed_on("the model"):
        raise MokError("as it was")
