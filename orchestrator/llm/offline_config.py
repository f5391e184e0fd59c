"""The options of ``shoal serve`` that mean something without a server."""

from collections.abc import Mapping
from typing import Any

from orchestrator.config.serve_config import ServeConfig
from orchestrator.config.sources import ConfigError, Setting, nearest, validate

_GROUPS = frozenset({"model", "engine", "parallelism", "scheduler", "sim"})
_SERVED_ONLY = frozenset({"served_model_name", "sim_report_delay_s"})


def offline_options() -> frozenset[str]:
    """Return the names that offline use takes."""
    return (
        frozenset(
            name
            for name, field in ServeConfig.model_fields.items()
            if isinstance(field.json_schema_extra, dict) and field.json_schema_extra["group"] in _GROUPS
        )
        - _SERVED_ONLY
    )


def offline_config(options: Mapping[str, Any]) -> ServeConfig:
    """Return the configuration; what has no meaning here keeps its default.

    Raises:
        ConfigError: a option that does not exist or needs a server, or a value it cannot take; names it.
    """
    known = offline_options()
    for name in options:
        if name in ServeConfig.model_fields and name not in known:
            raise ConfigError(f"{name} is an option of `shoal serve`; there is no server here")
        if name not in known:
            raise ConfigError(f"unknown option {name}{nearest(name, known)}")
    settings = {name: Setting(value, name) for name, value in options.items()}
    return validate({**settings, "executor": Setting("local", "executor")})
