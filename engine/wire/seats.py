"""Seats of the deployment: who sits in them, how the engines before ended, and who gives no sign of progress."""

from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum

from msgspec import Struct

from engine.wire.ids import EngineId


class EndKind(StrEnum):
    """How an engine can end, in words few enough for the label of a metric."""

    EXIT = "exit"  # by itself, with a status
    SIGNAL = "signal"  # killed by a signal
    LOST = "lost"  # with its host, or with what ran it there
    HUNG = "hung"  # killed by us, because it made no progress


class SeatState(IntEnum):
    """What the supervisor knows of a seat's process; the engine's own phase comes with its reports."""

    STARTING = 0
    ALIVE = 1
    LEAVING = 2
    DEAD = 3


class Seat(Struct, array_like=True, frozen=True):
    """One seat of the deployment and the engine that sits in it.

    reason: why the state is DEAD (exit status and last log line), else empty.
    restarts: how often the seat was filled again, by the ``EndKind`` of the engine before. last_reason: why the last
        one ended, also while its successor serves.
    is_draining: it takes no new requests, and may finish those it has. is_vacating: nor may it do that: clients let
        everything it has go on elsewhere. Both while it is still a member, which ends once it is LEAVING.
    """

    engine_id: EngineId
    state: SeatState
    reason: str = ""
    node: str = ""
    restarts: dict[str, int] = {}
    last_reason: str = ""
    is_draining: bool = False
    is_vacating: bool = False


def seats_by_rank(seats: Iterable[Seat]) -> dict[int, Seat]:
    """Return the seats by rank."""
    return {seat.engine_id.rank: seat for seat in seats}


def has_ended(engine_id: EngineId, seat: Seat | None) -> bool:
    """Tell whether an engine's host has confirmed that it is gone.

    seat: of its rank, as the supervisor reported it; None when there is none any more.
    """
    if seat is None or seat.engine_id.incarnation > engine_id.incarnation:
        return True
    return seat.engine_id == engine_id and seat.state is SeatState.DEAD


def any_has_ended(engine_ids: Iterable[EngineId], seats: Mapping[int, Seat]) -> bool:
    """Tell whether the host of any of these engines has confirmed that it is gone.

    seats: by rank. Empty says nothing of anybody: the coordinator has not heard them yet.
    """
    return bool(seats) and any(has_ended(engine_id, seats.get(engine_id.rank)) for engine_id in engine_ids)


class Suspect(Struct, array_like=True, frozen=True):
    """An engine that gives no sign of progress: it gets no new picks.

    is_hung: the stall limit has passed; its host shall kill it. reason: one sentence. for_s: seconds without a sign.
    is_silent: nothing is heard of it at all; else it reports, but its steps do not end.
    """

    engine_id: EngineId
    is_hung: bool
    reason: str
    for_s: float
    is_silent: bool = False
