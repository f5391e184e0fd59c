"""The parser of the command line, made from a table of commands: what it accepts has a function by construction."""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rich_argparse import RichHelpFormatter

from orchestrator.cli.options import known_flags
from orchestrator.config.sources import nearest

USAGE_ERROR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of ``shoal``.

    help: one line in the list of commands. description, usage: in its own ``--help``. add_arguments: adds what it takes
    to its parser. run: does it, with the parsed arguments and the environment; returns the exit status, and raises
    ``ShoalError`` for what is reported in one line.
    """

    help: str
    description: str | None = None
    usage: str | None = None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Mapping[str, str]], int]


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, with the nearest known option, and leaves the usage to ``--help``.

    It takes whole names of options alone: an abbreviation would end with the next option that begins alike.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(formatter_class=RichHelpFormatter, allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        """Print one line to standard error and exit with status 2."""
        unknown = re.search(r"unrecognized arguments: (--\S+)", message)
        if unknown:
            message = f"unknown option {unknown[1]}{nearest(unknown[1], known_flags())}"
        self.exit(USAGE_ERROR, f"shoal: error: {message}\n")


def make_parser(commands: Mapping[str, Command]) -> OneLineParser:
    """Return the parser of these commands; the name of the chosen one is ``command`` of what it returns."""
    parser = OneLineParser(
        prog="shoal",
        description="Data-parallel LLM serving on Ray.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands.items():
        command.add_arguments(
            subparsers.add_parser(name, help=command.help, description=command.description, usage=command.usage)
        )
    return parser
