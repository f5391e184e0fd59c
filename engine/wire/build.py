"""The build id and the configuration hash of a process: the handshake refuses an engine whose values differ."""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from engine.wire.schema import describe_wire


@cache
def build_id() -> str:
    """Return ``version+hash of the wire schema``: equal for processes that can talk to each other."""
    digest = hashlib.sha256(msgspec.json.encode(describe_wire(), order="sorted")).hexdigest()
    return f"{version('shoal')}+{digest[:8]}"


def config_hash(config: Any) -> str:
    """Return 16 hex digits over any msgspec-encodable configuration, independent of key order."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()[:16]


def config_values(config: Any) -> dict[str, str]:
    """Return every value of a msgspec-encodable configuration as JSON, by its dotted name.

    A hash shows that two configurations differ; with these a refusal can name the option.
    """
    return dict(_leaves("", msgspec.to_builtins(config)))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}".lstrip("."), part)
    else:
        yield name, msgspec.json.encode(value).decode()
