"""What waits for the output task."""

from dataclasses import dataclass

from engine.wire.ids import EngineId
from engine.wire.tensors import Frames


@dataclass(frozen=True, slots=True)
class Handshake:
    """Frames that came on the request channel."""

    frames: Frames


@dataclass(frozen=True, slots=True)
class Death:
    """News of an engine's death; queued behind the frames that came before it, so none of those is wasted."""

    engine_id: EngineId
    reason: str


Arrival = Frames | Handshake | Death
"""Bare frames are those of the output channel, the only ones that are many."""
