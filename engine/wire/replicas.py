"""Replicas as states carry them: the engine of each rank, how those before it ended, and which are suspect."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from engine.wire.ids import EngineId
from engine.wire.states import ReplicaState


class EndKind(StrEnum):
    """How an engine can end, in words few enough for the label of a metric."""

    EXIT = "exit"  # by itself, with a status
    SIGNAL = "signal"  # killed by a signal
    LOST = "lost"  # with its host, or with what ran it there
    HUNG = "hung"  # killed by us, because it made no progress


class ReplicaInfo(Struct, array_like=True, frozen=True):
    """One replica of the deployment: a rank, and the engine that serves it now.

    reason: why the state is DEAD (exit status and last log line), else empty.
    restarts: how often its engine was replaced, by the ``EndKind`` of the one before. last_reason: why the last one
        ended, also while its replacement serves.
    is_draining: it takes no new requests, and may finish those it has. is_migrating: it may not even do that: clients
        migrate everything it has. Both while it is still a member, which ends once it is LEAVING.
    """

    engine_id: EngineId
    state: ReplicaState
    reason: str = ""
    node: str = ""
    restarts: dict[str, int] = {}
    last_reason: str = ""
    is_draining: bool = False
    is_migrating: bool = False


def replicas_by_rank(replicas: Iterable[ReplicaInfo]) -> dict[int, ReplicaInfo]:
    """Return the replicas by rank."""
    return {replica.engine_id.rank: replica for replica in replicas}


def has_ended(engine_id: EngineId, replica: ReplicaInfo | None) -> bool:
    """Tell whether an engine's host has confirmed that it is gone.

    A replacement proves it too: the supervisor starts one only behind a confirmed end.
    replica: of its rank, as the supervisor reported it; None when there is none any more.
    """
    if replica is None or replica.engine_id.incarnation > engine_id.incarnation:
        return True
    return replica.engine_id == engine_id and replica.state is ReplicaState.DEAD


def any_has_ended(engine_ids: Iterable[EngineId], replicas: Mapping[int, ReplicaInfo]) -> bool:
    """Tell whether the host of any of these engines has confirmed that it is gone.

    replicas: by rank. Empty proves nothing: the coordinator has not heard the supervisor yet.
    """
    return bool(replicas) and any(has_ended(engine_id, replicas.get(engine_id.rank)) for engine_id in engine_ids)


class Suspect(Struct, array_like=True, frozen=True):
    """An engine without a sign of progress: clients pick it no more.

    is_hung: the stall limit has passed; its host shall kill it. reason: one sentence.
    is_silent: no report of it arrives; else it reports, but its steps do not end.
    """

    engine_id: EngineId
    is_hung: bool
    reason: str
    is_silent: bool = False
