"""The command line of ``shoal``, generated from the fields of ``ServeConfig`` so that a option is written once."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo
from rich_argparse import RichHelpFormatter

from orchestrator.cli.admin_commands import add_address, add_commands
from orchestrator.cli.scale_command import add_scale_commands
from orchestrator.config.serve_config import GROUPS, ServeConfig
from orchestrator.config.sources import flag_of, nearest

USAGE_ERROR = 2

_KEYS = {"SecretStr": "KEY", "tuple": "KEY"}


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest known option, and leaves the usage to ``--help``.

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


def known_flags() -> list[str]:
    """Return every flag of ``shoal serve`` that sets a option."""
    return [flag_of(name) for name in ServeConfig.model_fields]


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = OneLineParser(
        prog="shoal",
        description="Data-parallel LLM serving on Ray.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_status(commands)
    add_commands(commands)
    add_scale_commands(commands)
    commands.add_parser("version", help="print the version")
    return parser


def option_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given as flags, field name -> text, or texts of one that may be repeated."""
    return {name: value for name, value in vars(arguments).items() if name in ServeConfig.model_fields}


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        usage="shoal serve [OPTIONS]",
        help="start a deployment and serve until stopped",
        description="Start a deployment and serve it until Ctrl-C or SIGTERM. "
        "Flags win over SHOAL_* environment variables (SHOAL_MAX_MODEL_LEN), those over the file, that over defaults.",
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="TOML or YAML file with options as keys")
    sections = {name: serve.add_argument_group(name, text) for name, text in GROUPS.items()}
    for name, field in ServeConfig.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        value: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        sections[str(extra["group"])].add_argument(
            flag_of(name),
            dest=name,
            action="append" if _is_repeatable(field) else "store",
            default=argparse.SUPPRESS,
            metavar=_metavar(field),
            help=_help(field),
            **value,
        )


def _add_status(commands: Any) -> None:
    status = commands.add_parser(
        "status",
        help="show the ranks of a running deployment",
        description="Show the ranks of a running deployment; without --url, of the one on this machine.",
    )
    add_address(status, "--api-key", "a key of the deployment; default: SHOAL_ADMIN_API_KEY or SHOAL_API_KEY")
    status.add_argument("--json", action="store_true", help="print the answer of /v1/cluster as it is")


def _is_repeatable(field: FieldInfo) -> bool:
    return any(get_origin(kind) is tuple for kind in get_args(field.annotation))


def _metavar(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "{" + ",".join(map(str, get_args(field.annotation))) + "}"
    names: Sequence[Any] = get_args(field.annotation) or (field.annotation,)
    return {"bool": "BOOL", "int": "N", "float": "X", "ByteSize": "BYTES", "Path": "DIR", **_KEYS}.get(
        names[0].__name__, "TEXT"
    )


def _help(field: FieldInfo) -> str:
    text = str(field.description).replace("%", "%%")
    return text if field.default is None else f"{text} (default: {field.default})"
