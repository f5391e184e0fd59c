"""The view of one engine as a client sees it, for people and metrics. Pure."""

from dataclasses import dataclass

from engine.wire.ids import EngineId
from engine.wire.messages import EngineReady, EngineReport
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EngineState
from lb.views.totals import NOTHING_COUNTED, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine as one client sees it at one moment.

    reason: why it is dead, suspect or refused, else empty.
    report: its last report in the snapshot. ready: its handshake. replica: as the supervisor reports it. Each is None
        before it was received.
    num_in_flight: this client's unfinished sequences on it. num_picks: sequences this client has sent it.
    totals: what the rank's engines have counted, over all its incarnations.
    """

    engine_id: EngineId
    state: EngineState
    reason: str = ""
    report: EngineReport | None = None
    ready: EngineReady | None = None
    replica: ReplicaInfo | None = None
    num_in_flight: int = 0
    num_picks: int = 0
    totals: Totals = NOTHING_COUNTED
