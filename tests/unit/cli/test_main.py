"""The dispatch of ``shoal``: whatever the parser accepts runs its own function, and nothing else does."""

import argparse
from dataclasses import replace

import pytest

from engine.wire.errors import ShoalError, StartupError
from orchestrator.cli import main as shoal
from orchestrator.cli.parser import Command, make_parser
from orchestrator.config.sources import ConfigError

ARGUMENTS = {"cordon": ["0"], "uncordon": ["0"], "drain": ["0"], "abort": ["--all"]}


@pytest.mark.parametrize("name", shoal.COMMANDS)
def test_every_command_runs_its_own_function_and_returns_its_status(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def stub(options: argparse.Namespace, _environment: object) -> int:
        ran.append(options.command)
        return 7

    def unexpected(*_: object) -> int:
        raise AssertionError("the function of another command")

    others = {other: replace(command, run=unexpected) for other, command in shoal.COMMANDS.items()}
    monkeypatch.setattr(shoal, "COMMANDS", {**others, name: replace(shoal.COMMANDS[name], run=stub)})
    assert shoal.main([name, *ARGUMENTS.get(name, [])]) == 7
    assert ran == [name]


def test_a_command_without_a_function_cannot_be_made_and_one_without_an_entry_is_not_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(TypeError, match="run"):
        Command(help="x", add_arguments=lambda _: None)  # type: ignore[call-arg]
    with pytest.raises(SystemExit) as caught:
        make_parser({"version": shoal.COMMANDS["version"]}).parse_args(["status"])
    assert caught.value.code == 2
    assert "invalid choice: 'status'" in capsys.readouterr().err


def test_version_prints_the_version_and_no_other_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("shoal ")


@pytest.mark.parametrize(
    ("raised", "status", "shown"),
    [
        (ShoalError("no rank 7"), 1, "shoal: error: no rank 7\n"),
        (StartupError("no Ray"), 1, "shoal: error: no Ray\n"),
        (ConfigError("--port: must be a number"), 2, "shoal: error: --port: must be a number\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_line_and_a_status(
    raised: BaseException,
    status: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> int:
        raise raised

    monkeypatch.setattr(shoal, "COMMANDS", {"version": replace(shoal.COMMANDS["version"], run=fail)})
    assert shoal.main(["version"]) == status
    assert capsys.readouterr().err == shown
