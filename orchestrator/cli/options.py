"""The options of ``shoal serve``, generated from the fields of ``ServeConfig`` so that each is written once."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from orchestrator.config.serve_config import GROUPS, ServeConfig
from orchestrator.config.sources import flag_of

_KEYS = {"SecretStr": "KEY", "tuple": "KEY"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option, in the groups of the configuration."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML or YAML file with options as keys")
    sections = {name: parser.add_argument_group(name, text) for name, text in GROUPS.items()}
    for name, field in ServeConfig.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        value: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        # Suppressed defaults, and text for all values: where a value comes from decides which one wins, and the
        # configuration alone validates them.
        sections[str(extra["group"])].add_argument(
            flag_of(name),
            dest=name,
            action="append" if _is_repeatable(field) else "store",
            default=argparse.SUPPRESS,
            metavar=_metavar(field),
            help=_help(field),
            **value,
        )


def known_flags() -> list[str]:
    """Return every flag of ``shoal serve`` that sets an option."""
    return [flag_of(name) for name in ServeConfig.model_fields]


def option_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given as flags, field name -> text, or texts of one that may be repeated."""
    return {name: value for name, value in vars(arguments).items() if name in ServeConfig.model_fields}


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
