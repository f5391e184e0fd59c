"""The layout of every wire message as plain data, for the schema lock and the build id."""

from typing import Any

import msgspec

from engine.wire import ids, messages, sampling


def describe_wire() -> dict[str, Any]:
    """Return ``{struct name: {"tag": ..., "fields": ["name: type", ...]}}`` in wire order."""
    structs: dict[str, Any] = {}
    for module in (ids, sampling, messages):
        for name, member in vars(module).items():
            if isinstance(member, type) and issubclass(member, msgspec.Struct) and member is not msgspec.Struct:
                structs[name] = {
                    "tag": member.__struct_config__.tag,
                    "fields": [f"{field.name}: {_type_name(field.type)}" for field in msgspec.structs.fields(member)],
                }
    return dict(sorted(structs.items()))


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return str(annotation).replace("engine.wire.", "")
