"""Help of every command, and a user's mistakes in each."""

from __future__ import annotations

import argparse

import pytest

from mokfx.cli import COMMANDS, _parser, main


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, and of the commands in it."""
    found: dict[str, argparse.ArgumentParser] = {}
    todo = [("mokfx", _parser())]
    while todo:
        name, parser = todo.pop()
        found[name] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += [(f"{name} {choice}", each) for choice, each in action.choices.items()]
    return found


@pytest.mark.parametrize("name", parsers())
def test_help_says_what_a_command_does_and_each_argument_what_it_is_for(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = parsers()[name]
    assert parser.description and parser.description.endswith(".")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            assert all(choice.help for choice in action._choices_actions)
        else:
            assert action.help and action.help is not argparse.SUPPRESS, action
    with pytest.raises(SystemExit) as ended:
        main([*name.split()[1:], "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: {name}")
    assert max(map(len, lines)) <= 80


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command.name} " in text and command.summary[:20] in text


@pytest.mark.parametrize("name", parsers())
def test_an_unknown_option_is_a_usage_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*name.split()[1:], "--no-such-option"])
    assert ended.value.code == 2
    assert "usage: mokfx" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "explain"])
def test_a_factory_that_is_none_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "no.such.module:make"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mokfx: no module 'no'") and said.err.count("\n") == 1
