"""The command line: generated from the options, frozen by a snapshot."""

import argparse
from pathlib import Path

import pytest

from orchestrator.cli.main import COMMANDS
from orchestrator.cli.options import option_flags
from orchestrator.cli.parser import make_parser
from orchestrator.config.serve_config import GROUPS, ServeConfig

SNAPSHOT = Path(__file__).with_name("cli_options.txt")


def describe_options() -> str:
    """Return one line per option of every command, in the order of ``--help``."""
    commands = next(a for a in make_parser(COMMANDS)._actions if isinstance(a, argparse._SubParsersAction))
    lines = []
    for name, parser in commands.choices.items():
        for group in parser._action_groups:
            for action in group._group_actions:
                spelled = " ".join(filter(None, [", ".join(action.option_strings), action.metavar]))
                lines.append(f"{name} [{group.title}] {spelled}: {action.help}")
    return "\n".join(lines) + "\n"


def test_the_options_are_those_of_the_snapshot() -> None:
    """Whoever changes an option on purpose writes the new text into cli_options.txt."""
    assert describe_options() == SNAPSHOT.read_text()


def test_every_option_has_a_help_text_and_a_group_that_exists() -> None:
    for name, field in ServeConfig.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict)
        assert field.json_schema_extra["group"] in GROUPS


def test_only_options_that_were_given_are_flags() -> None:
    options = make_parser(COMMANDS).parse_args(["serve", "--port", "1", "--engine", "sim", "--config", "a.toml"])
    assert option_flags(options) == {"port": "1", "engine": "sim"}
    assert options.config == Path("a.toml")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--modle", "x"], "unknown option --modle (did you mean --model?)"),
        (["serve", "--data-parallel", "2"], "unknown option --data-parallel (did you mean --data-parallel-size?)"),
        (["serve", "--port"], "argument --port: expected one argument"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        make_parser(COMMANDS).parse_args(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"shoal: error: {expected}\n"
