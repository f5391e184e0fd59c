"""The follower of the coordinator: membership, deaths and loads by its group states and load snapshots. Pure."""

from typing import NamedTuple

from client.connection_table import ConnectionTable, Gone
from client.engine_connection import EngineConnection
from client.views import make_views
from engine.wire.control import ClusterSettings
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineReport, GroupState, LoadSnapshot
from engine.wire.newest import NewestState
from engine.wire.replicas import ReplicaInfo, replicas_by_rank
from engine.wire.states import EnginePhase, ReplicaState
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView, view_group
from lb.views.totals import RankTotals

SNAPSHOT_STALE_S = 3.0
"""Snapshots come at least once a second; after three missing ones the client's own counts are worth more."""


class GroupChange(NamedTuple):
    """What a new group state asks the client to do.

    settings: the operator's newest, when they changed. deaths: engines whose hosts saw them end. migrating: connections
    whose engines are to be freed without waiting for their streams.
    """

    settings: ClusterSettings | None
    deaths: list[Gone]
    migrating: list[EngineConnection]


class StateFollower:
    """Keeps the newest group state and load snapshot, and writes what is in them into the connections.

    A state counts when it is newer than every one before (``NewestState``), so loss, repetition and a restarted
    coordinator need no other rule. Silence of the coordinator changes nothing but the age of what is known.

    current_wave: number of the running period of a lockstep group, as far as this client has heard or requested; 0 for
        independent ranks.
    lb_engines: the engines of the committed membership, in the order of their ranks.
    num_clients: live clients of the deployment, this one included.
    settings: the newest that the operator wants.
    group_state, snapshot: the newest; None before the first.
    """

    def __init__(self, client_id: ClientId, engines: ConnectionTable, totals: RankTotals) -> None:
        """Begin. engines: written to. totals: what keeps the counters of the ranks."""
        self.current_wave = 0
        self.lb_engines: list[EngineId] = []
        self.num_clients = 1
        self.settings = ClusterSettings()
        self.group_state: GroupState | None = None
        self.snapshot: LoadSnapshot | None = None
        self._client_id = client_id
        self._engines = engines
        self._totals = totals
        self._newest_group_state = NewestState()
        self._newest_snapshot = NewestState()
        self._snapshot_at: float | None = None
        self._replicas: dict[int, ReplicaInfo] = {}
        self._dismissed: frozenset[EngineId] = frozenset()
        self._suspects: dict[EngineId, str] = {}
        self._reports: dict[EngineId, EngineReport] = {}

    def snapshot_age_s(self, now: float) -> float | None:
        """Return seconds since the last snapshot came; None before the first. now: monotonic seconds, as everywhere."""
        return None if self._snapshot_at is None else now - self._snapshot_at

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, one per rank, in the order of the ranks."""
        return make_views(
            self._engines.connections,
            self._reports,
            self._replicas,
            self._engines.gone,
            self._engines.refused,
            self._suspects,
            totals=self._totals,
        )

    def group_view(self) -> GroupView | None:
        """Return what is known of the lockstep group; None for independent ranks."""
        return view_group(self.group_state)

    def describe_missing(self) -> list[str]:
        """Return a sentence for each engine that is expected and has not shaken hands, as far as it is known."""
        if not self._newest_group_state.is_heard:
            return ["nothing was heard from the coordinator"]
        loading = [
            f"engine {report.engine_id}: loading, {report.detail or 'no detail'} ({report.progress:.0%})"
            for report in self._reports.values()
            if report.phase is EnginePhase.LOADING
        ]
        silent = [
            f"engine {replica.engine_id}: {replica.state.name.lower()}, has not reported"
            for replica in self._replicas.values()
            if replica.engine_id not in self._reports and replica.engine_id not in self._engines.gone
        ]
        return [*loading, *silent]

    # --- group states -----------------------------------------------------------------------------------------------

    def on_group_state(self, state: GroupState) -> GroupChange | None:
        """Take a group state; return what it asks for, None when it is not newer than the last one."""
        if not self._newest_group_state.accept(state.generation, state.seq):
            return None
        self.group_state = state
        self.current_wave = state.wave_started
        self.lb_engines = sorted(state.committed.members)
        self.num_clients = max(1, len(state.clients))
        is_new = state.settings.seq > self.settings.seq  # a coordinator that has just restarted may not know them yet
        if is_new:
            self.settings = state.settings
        self._replicas = replicas_by_rank(state.replicas)
        self._dismissed = frozenset(state.dismissed)
        self._suspects = {suspect.engine_id: suspect.reason for suspect in state.suspects}
        connections = self._engines.connections
        for connection in connections.values():
            self.note_status(connection)
        migrating = [replica.engine_id for replica in state.replicas if replica.is_migrating]
        return GroupChange(
            state.settings if is_new else None,
            self._deaths(),
            [connections[engine_id] for engine_id in migrating if engine_id in connections],
        )

    def note_status(self, connection: EngineConnection) -> None:
        """Write into a connection what the newest group state has of its engine."""
        engine_id = connection.engine_id
        replica = self._replicas.get(engine_id.rank)
        its_replica_leaves = (
            replica is not None
            and replica.engine_id == engine_id
            and (replica.state is ReplicaState.LEAVING or replica.is_draining)
        )
        connection.leaving = its_replica_leaves or engine_id in self._dismissed
        connection.dismissed = connection.dismissed or engine_id in self._dismissed
        connection.cordoned = engine_id.rank in self.settings.cordoned
        connection.suspect = engine_id in self._suspects

    def _deaths(self) -> list[Gone]:
        """Return engines that the supervisor's hosts saw end, whether or not they ever shook hands with this client."""
        deaths = [
            Gone(replica.engine_id, replica.reason or "its process ended")
            for replica in self._replicas.values()
            if replica.state is ReplicaState.DEAD
        ]
        for engine_id in self._engines.connections:
            replica = self._replicas.get(engine_id.rank)
            if replica is not None and replica.engine_id.incarnation > engine_id.incarnation:
                deaths.append(Gone(engine_id, f"{replica.engine_id} replaced it"))
            elif replica is None and self._replicas:  # no replicas at all: the supervisor was not heard yet
                deaths.append(Gone(engine_id, "its replica was removed"))
        return [death for death in deaths if death.engine_id not in self._engines.gone]

    # --- load snapshots ---------------------------------------------------------------------------------------------

    def on_snapshot(self, snapshot: LoadSnapshot, now: float) -> None:
        """Take a load snapshot, unless it is not newer than the last one; it also proves delivery of messages."""
        if not self._newest_snapshot.accept(snapshot.generation, snapshot.seq):
            return
        self.snapshot = snapshot
        self._snapshot_at = now
        self._reports = {report.engine_id: report for report in snapshot.reports}
        self._totals.on_reports(snapshot.reports)
        for connection in self._engines.connections.values():
            report = self._reports.get(connection.engine_id)
            if report is not None:
                applied = report.applied.get(self._client_id, 0)
                connection.on_applied(applied)
                connection.ledger.on_report(report.report_seq, applied, report.load, now)

    def on_time(self, now: float) -> None:
        """Stop believing reports that have grown old; a few times a second."""
        for connection in self._engines.connections.values():
            if now - connection.ledger.fresh_at > SNAPSHOT_STALE_S:
                connection.ledger.stale = True

    def wave_to_request(self) -> int:
        """Return the next wave, when a request was sent while all members of a lockstep group are idle; else 0.

        It is returned once for each wave. The engine that got the request asks for it too, one hop later; so one that
        is lost, or made for nothing, does no harm.
        """
        reports = [self._reports.get(member) for member in self.lb_engines]
        if any(r is None or r.member is None or r.phase is not EnginePhase.IDLE for r in reports) or not reports:
            return 0
        if any(report is None or report.wave != self.current_wave for report in reports):
            return 0
        self.current_wave += 1
        return self.current_wave
