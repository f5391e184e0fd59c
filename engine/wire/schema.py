"""The layout of every wire message as plain data, for the schema lock and the build id.

``python -m engine.wire.schema`` prints it as the lock file holds it.
"""

import json
import re
import sys
from enum import Enum
from typing import Any

import msgspec

from engine.wire import control, ids, load, logprobs, messages, replicas, sampling
from engine.wire.errors import UtilityErrorCode
from engine.wire.states import EnginePhase, ReplicaState

_MODULE = re.compile(r"\b(typing|engine\.wire\.\w+)\.")
"""In front of a type's name; where a type is defined is no part of the layout."""


def describe_wire() -> dict[str, Any]:
    """Return the structs and enums of the wire by name.

    A struct is ``{"tag": ..., "fields": ["name: type", ...], "num_required": ...}`` with its fields in wire order, an
    enum ``{"members": ["NAME = value", ...]}``. The build id hashes it, so a change of layout is another build.
    """
    described: dict[str, Any] = {}
    for module in (ids, sampling, logprobs, load, replicas, control, messages):
        for name, member in vars(module).items():
            if not isinstance(member, type) or member.__module__ != module.__name__:
                continue
            if issubclass(member, msgspec.Struct):
                described[name] = _describe_struct(member)
            elif issubclass(member, Enum):
                described[name] = _describe_enum(member)
    for enum in (EnginePhase, ReplicaState, UtilityErrorCode):  # the rest of their modules never travels
        described[enum.__name__] = _describe_enum(enum)
    return dict(sorted(described.items()))


def _describe_struct(struct: type[msgspec.Struct]) -> dict[str, Any]:
    fields = msgspec.structs.fields(struct)
    return {
        "tag": struct.__struct_config__.tag,
        "fields": [f"{field.name}: {_type_name(field.type)}" for field in fields],
        "num_required": sum(field.required for field in fields),
    }


def _describe_enum(enum: type[Enum]) -> dict[str, Any]:
    return {"members": [f"{entry.name} = {entry.value!r}" for entry in enum]}


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return _MODULE.sub("", str(annotation))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe_wire(), indent=2) + "\n")
