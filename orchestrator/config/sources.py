"""The sources of options: flags, then ``SHOAL_*`` variables, then a TOML or YAML file, then the defaults.

Unknown keys are errors everywhere, with the nearest known one: a misspelt option that is silently ignored costs more
than a start that fails.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from engine.wire.errors import StartupError
from engine.wire.process import PARENT_PID_VARIABLE
from orchestrator.config.serve_config import SECRET_OPTIONS, ServeConfig

PREFIX = "SHOAL_"
FILE_VARIABLE = PREFIX + "CONFIG"

_NOT_OPTIONS = frozenset({PARENT_PID_VARIABLE, FILE_VARIABLE})


class ConfigError(StartupError):
    """An option that does not exist or a value it cannot take; names where it was written. Fix and restart."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it was written, spelled as there."""

    value: Any
    spelling: str


def load(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> ServeConfig:
    """Merge the sources and validate once.

    flags: field name -> text, or texts where a flag may be repeated; only those given. environment: all variables of
    the process. file: TOML or YAML by its suffix; default: the one ``SHOAL_CONFIG`` names, if any.

    Raises:
        ConfigError: an unknown key, a wrong value or an unreadable file.
    """
    if file is None and FILE_VARIABLE in environment:
        file = Path(environment[FILE_VARIABLE])
    settings = {
        **(_from_file(file) if file is not None else {}),
        **_from_environment(environment),
        **{name: Setting(value, flag_of(name)) for name, value in flags.items()},
    }
    return validate(settings)


def validate(settings: Mapping[str, Setting]) -> ServeConfig:
    """Return the configuration of settings by field name.

    Raises:
        ConfigError: a value that an option cannot take; names where it was written.
    """
    try:
        return ServeConfig(**{name: setting.value for name, setting in settings.items()})
    except ValidationError as error:
        raise ConfigError(_describe(error, settings)) from error


def flag_of(name: str) -> str:
    """Return the command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` for the nearest known name, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def _from_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    known = {PREFIX + name.upper(): name for name in ServeConfig.model_fields}
    settings = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or variable in _NOT_OPTIONS:
            continue
        # Any other SHOAL_* variable is taken for a misspelt option, as an unknown flag is.
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{nearest(variable, [*known, FILE_VARIABLE])}")
        settings[known[variable]] = Setting(value, variable)
    return settings


def _from_file(path: Path) -> dict[str, Setting]:
    settings = {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name not in ServeConfig.model_fields:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(name, ServeConfig.model_fields)}")
        settings[name] = Setting(value, f"{path}: {key}")
    return settings


def _read(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if _is_toml(path) else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: odd numbers, dates, encodings
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected keys and values, found a {type(content).__name__}")
    return content


def _is_toml(path: Path) -> bool:
    if path.suffix in (".yaml", ".yml"):
        return False
    if path.suffix == ".toml":
        return True
    raise ConfigError(f"--config {path}: the name must end in .toml, .yaml or .yml")


def _describe(error: ValidationError, settings: Mapping[str, Setting]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            lines.append(message)
            continue
        name = str(problem["loc"][0])
        message = message.replace("Input should be", "must be").replace("Value should", "must")
        text = ServeConfig.model_fields[name].description
        # A key that is invalid is a key all the same.
        given = "" if name in SECRET_OPTIONS else f", not {settings[name].value!r}"
        lines.append(f"{settings[name].spelling}: {message}{given} ({text})")
    return "; ".join(lines)
