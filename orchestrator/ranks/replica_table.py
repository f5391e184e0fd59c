"""The table of replicas: what the supervisor knows of each rank, and what follows from a report or an end. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.wire.control import ClusterSettings
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineReport, SupervisorReport
from engine.wire.replicas import ReplicaInfo, Suspect
from engine.wire.states import EnginePhase, ReplicaState
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.restarts import RestartRule, Restarts


@dataclass(slots=True)
class ReplicaHistory:
    """What outlives the engines of a replica.

    restarts: whether and when the next one starts. replacements: how many there were, by the kind of the end before.
    last_reason: why the last engine that ended did; a dismissal is none.
    """

    restarts: Restarts
    replacements: Counter[str] = field(default_factory=Counter)
    last_reason: str = ""


@dataclass(slots=True)
class Replica:
    """One rank as the supervisor keeps it: the engine that serves it now, or the last one that did.

    report: the engine's newest. exit: set once, when its host confirmed the end; replacement_in_s: set with it, the
    pause before the next engine, None when there will be none. dismissed: the engine was asked to end. suspect: as the
    coordinator publishes it. hung: why the supervisor killed it.
    is_joining, is_draining, is_migrating, is_leaving: what a scale operation has done to it.
    """

    engine_id: EngineId
    history: ReplicaHistory
    report: EngineReport | None = None
    exit: ProcessExit | None = None
    replacement_in_s: float | None = None
    dismissed: bool = False
    suspect: Suspect | None = None
    hung: str = ""
    is_joining: bool = False
    is_draining: bool = False
    is_migrating: bool = False
    is_leaving: bool = False

    @property
    def is_temporary(self) -> bool:
        """Tell whether the replica may go with its engine, which is therefore not replaced by itself."""
        return self.is_joining or self.is_draining or self.is_leaving or self.dismissed

    @property
    def is_empty(self) -> bool:
        """Tell whether the engine accepts no requests and has none left: it will stay empty."""
        return self.report is not None and self.report.is_draining and self.num_sequences == 0

    @property
    def num_sequences(self) -> int:
        """Return how many sequences the engine has, by its newest report."""
        return self.report.load.num_sequences if self.report is not None else 0

    @property
    def is_ready(self) -> bool:
        """Tell whether the engine has loaded and lives."""
        return self.exit is None and self.report is not None and self.report.phase is not EnginePhase.LOADING

    @property
    def is_lost(self) -> bool:
        """Tell whether the replica's engine is dead and no other will take its place."""
        return self.exit is not None and self.replacement_in_s is None

    @property
    def state(self) -> ReplicaState:
        """Return the state as it is published."""
        if self.exit is not None:
            return ReplicaState.DEAD
        # A cordoned rank is ALIVE still: it finishes what it has, and can be restored.
        if self.dismissed or self.is_leaving:
            return ReplicaState.LEAVING
        return ReplicaState.ALIVE if self.is_ready else ReplicaState.STARTING

    @property
    def progress(self) -> float:
        """Return how far the engine has loaded, 0..1."""
        return 1.0 if self.is_ready else self.report.progress if self.report is not None else 0.0

    @property
    def activity(self) -> str:
        """Return in a few words what the engine is doing, or why it is dead."""
        if self.exit is not None:
            return f"dead: {self.exit.reason}"
        if self.report is None:
            return "starting"
        if self.report.phase is EnginePhase.LOADING:
            return f"loading: {self.report.detail}" if self.report.detail else "loading"
        return f"ready on {self.report.device} of {self.report.node} (pid {self.report.pid})"

    @property
    def name(self) -> str:
        """Return rank, engine, process and node: what a person needs to find the engine."""
        where = f", pid {self.report.pid} on {self.report.node}" if self.report is not None else ""
        return f"rank {self.engine_id.rank} (engine {self.engine_id}{where})"

    @property
    def end_reason(self) -> str:
        """Return why the engine's process ended; empty while it lives."""
        return self.exit.reason if self.exit is not None else ""

    def describe(self) -> str:
        """Return what the engine is doing, how far it is, and where."""
        if self.exit is None and self.report is not None and self.report.phase is EnginePhase.LOADING:
            return f"{self.activity}, {self.progress:.0%}, pid {self.report.pid} on {self.report.node}"
        return self.activity


class ReplicaTable:
    """All replicas of the deployment, by rank; each has one engine at a time.

    replacements: whether engines that end are replaced; not while the deployment starts, where an end is an error of
    the start. gone_clients: by index, the newest client whose process has ended. settings: desired state of the
    deployment; published with the replicas.
    """

    def __init__(self, engine_ids: Sequence[EngineId], rule: RestartRule) -> None:
        self.replacements = False
        self._rule = rule
        self.gone_clients: dict[int, ClientId] = {}
        self.settings = ClusterSettings()
        self._closed: dict[int, Replica] = {}
        self._replicas = {
            engine_id.rank: Replica(engine_id, ReplicaHistory(Restarts(rule))) for engine_id in engine_ids
        }

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def at(self, rank: int) -> Replica | None:
        """Return the replica of a rank, None when there is none."""
        return self._replicas.get(rank)

    def of(self, engine_id: EngineId) -> Replica | None:
        """Return the replica of this engine, or None when another engine is in its place, or none."""
        replica = self._replicas.get(engine_id.rank)
        return replica if replica is not None and replica.engine_id == engine_id else None

    def on_report(self, report: EngineReport, now: float) -> Replica | None:
        """Take an engine's report; return its replica, None for a stale report or one of an unknown engine."""
        replica = self.of(report.engine_id)
        # Reports are whole and numbered by their engine, so the newest alone counts. A snapshot repeats those it has.
        if replica is None or (replica.report is not None and report.report_seq <= replica.report.report_seq):
            return None
        replica.report = report
        # Service begins with the first report of a loaded engine: an end while loading does not begin a new row.
        if replica.is_ready:
            replica.history.restarts.on_serving(now)
        return replica

    def on_exit(self, engine_id: EngineId, end: ProcessExit, now: float) -> Replica:
        """Take the confirmed end of an engine's process; return its replica, with whether and when it is replaced."""
        replica = self.of(engine_id)
        assert replica is not None, "a replica gets its next engine only after the end of the one before"
        if replica.hung:
            end = replace(end, reason=f"hung: {replica.hung}, killed", was_hung=True)
        replica.exit = end
        # An engine that was asked to end has no reason that anybody would look for.
        if not replica.dismissed:
            replica.history.last_reason = end.reason
        # A rank that comes or goes by a scale operation is that operation's: replacing its engine here would undo it.
        replica.replacement_in_s = (
            replica.history.restarts.on_end(now) if self.replacements and not replica.is_temporary else None
        )
        return replica

    def on_suspects(self, suspects: Sequence[Suspect]) -> tuple[list[Replica], list[Replica]]:
        """Take the coordinator's suspects; return the replicas that became suspect or recovered, and those that hang.

        An engine hangs once: it is killed for it, and later suspicions of it until its end change nothing.
        """
        by_engine = {suspect.engine_id: suspect for suspect in suspects}
        changed, hung = [], []
        for replica in self._replicas.values():
            suspect = by_engine.get(replica.engine_id)
            # The host has confirmed the end, or is asked for it: either outweighs what the coordinator still publishes.
            if replica.exit is not None or replica.hung:
                continue
            if suspect is not None and suspect.is_hung:
                replica.hung = suspect.reason
                hung.append(replica)
            elif (suspect is None) != (replica.suspect is None):
                changed.append(replica)
            replica.suspect = suspect
        return changed, hung

    def replace(self, rank: int) -> Replica:
        """Put the next incarnation in the place of an engine that ended; return its replica."""
        old = self._replicas[rank]
        assert old.exit is not None
        # Counted by the kind of the end before: the metric shows why engines are replaced.
        old.history.replacements[old.exit.kind] += 1
        engine_id = EngineId(rank, old.engine_id.incarnation + 1)
        self._replicas[rank] = Replica(engine_id, old.history)
        return self._replicas[rank]

    def open(self, rank: int) -> Replica:
        """Add a replica whose engine is not replaced by itself; return it.

        One that was closed comes back under its next incarnation: no EngineId is used twice.
        """
        assert rank not in self._replicas
        closed = self._closed.pop(rank, None)
        if closed is None:
            replica = Replica(EngineId(rank, 1), ReplicaHistory(Restarts(self._rule)), is_joining=True)
        else:
            engine_id = EngineId(rank, closed.engine_id.incarnation + 1)
            replica = Replica(engine_id, closed.history, is_joining=True)
        self._replicas[rank] = replica
        return replica

    def close(self, rank: int) -> None:
        """Remove a replica whose engine has ended. Its history and its incarnation are remembered."""
        replica = self._replicas.pop(rank)
        assert replica.exit is not None
        self._closed[rank] = replica

    def keep(self, rank: int, now: float) -> float | None:
        """Make a replica like any other; return the pause before its next engine if the last one ended meanwhile."""
        replica = self._replicas[rank]
        replica.is_joining = replica.is_draining = replica.is_migrating = replica.is_leaving = False
        # Its engine may have ended while the scale operation held the replica, which then got no replacement.
        if replica.exit is not None and replica.replacement_in_s is None and self.replacements:
            replica.replacement_in_s = replica.history.restarts.on_end(now)
            return replica.replacement_in_s
        return None

    def dismiss(self) -> None:
        """Ask every engine to end."""
        for replica in self._replicas.values():
            replica.dismissed = True

    @property
    def all_ready(self) -> bool:
        """Tell whether every replica's engine can serve."""
        return all(replica.is_ready for replica in self._replicas.values())

    @property
    def is_settled(self) -> bool:
        """Tell whether reports bring nothing new: each engine serves or is dead, and none comes or goes."""
        return all((replica.is_ready or replica.exit is not None) and not replica.is_temporary for replica in self)

    @property
    def all_lost(self) -> bool:
        """Tell whether no engine is left and none will come."""
        return all(replica.is_lost for replica in self._replicas.values())

    def describe_unready(self) -> str:
        """Return each rank that is not ready, with what it is doing or why it is dead."""
        lines = [
            f"rank {replica.engine_id.rank}: {replica.describe()}"
            for replica in self._replicas.values()
            if not replica.is_ready
        ]
        return "; ".join(lines)

    def to_report(self, report_seq: int) -> SupervisorReport:
        """Return the whole table as it is published."""
        replicas = self._replicas.values()
        return SupervisorReport(
            report_seq=report_seq,
            replicas=[_to_wire(replica) for replica in replicas],
            dismissed=[replica.engine_id for replica in replicas if replica.dismissed],
            # Repeated with every report, as everything in it: no engine can miss that a client is gone.
            gone_clients=list(self.gone_clients.values()),
            settings=self.settings,
        )


def _to_wire(replica: Replica) -> ReplicaInfo:
    return ReplicaInfo(
        engine_id=replica.engine_id,
        state=replica.state,
        reason=replica.end_reason,
        node=replica.report.node if replica.report is not None else "",
        restarts=dict(replica.history.replacements),
        is_draining=replica.is_draining,
        is_migrating=replica.is_migrating,
        last_reason=replica.history.last_reason,
    )
