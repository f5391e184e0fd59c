"""The wire's layout is locked; a change must be an append, and is then recorded in the lock."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine.wire
from engine.wire.schema import describe_wire

LOCK = Path(engine.wire.__file__).parent / "schema.lock.json"
REFRESH = "python -m engine.wire.schema > engine/wire/schema.lock.json"


def breaks(locked: dict[str, Any], described: dict[str, Any]) -> list[str]:
    """Return one sentence for each way in which a process of the locked wire could not talk to one of the new."""
    gone = [f"{name} is gone" for name in sorted(locked.keys() - described.keys())]
    both = sorted(locked.keys() & described.keys())
    return gone + [f"{name}: {reason}" for name in both for reason in _changes(locked[name], described[name])]


def _changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    if old.get("tag") != new.get("tag"):
        yield "another tag"
    if new.get("num_required", 0) > old.get("num_required", 0):
        yield "a new field without a default"
    for part in ("fields", "members"):
        if new.get(part, [])[: len(old.get(part, []))] != old.get(part, []):
            yield f"{part} were removed, reordered or changed; only appending is allowed"


def test_the_layout_is_the_locked_one() -> None:
    locked, described = json.loads(LOCK.read_text()), describe_wire()
    broken = breaks(locked, described)
    assert not broken, f"the wire breaks its rule: {broken}"
    assert described == locked, f"fields were appended; record them with: {REFRESH}"


def locked_struct(*fields: str, num_required: int = 1) -> dict[str, Any]:
    return {"M": {"tag": None, "fields": list(fields), "num_required": num_required}}


def test_only_appending_with_a_default_is_no_break() -> None:
    old = locked_struct("a: int", "b: str")
    assert not breaks(old, locked_struct("a: int", "b: str", "c: int"))
    assert breaks(old, locked_struct("a: int", "b: str", "c: int", num_required=2))
    assert breaks(old, locked_struct("b: str", "a: int"))
    assert breaks(old, locked_struct("a: int"))
    assert breaks(old, locked_struct("a: float", "b: str"))
    assert breaks(old, {})


def test_every_message_and_every_enum_is_locked() -> None:
    described = describe_wire()
    assert {"AddRequest", "EngineCoreOutputs", "GroupState", "EngineId", "SamplingParams"} <= described.keys()
    assert "REROUTE = 4" in described["FinishReason"]["members"]
