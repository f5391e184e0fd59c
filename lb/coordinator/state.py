"""The coordinator's state as plain data: reports and ``now`` in, the next GroupState and LoadSnapshot out. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import astuple

from engine.wire.control import ClusterSettings, Membership, PauseMode
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import (
    ClientInfo,
    ClientReport,
    EngineReport,
    GroupState,
    LoadSnapshot,
    Report,
    SupervisorReport,
)
from engine.wire.replicas import ReplicaInfo, replicas_by_rank
from engine.wire.states import ReplicaState
from lb.coordinator.config import LockstepConfig
from lb.coordinator.failure_detector import SERVING, FailureDetector
from lb.coordinator.lockstep_group import LockstepGroup

MAX_CLIENTS = 1024
MAX_REPLICAS = 4096
"""Reports of more are dropped: whoever reaches the report channel must not be able to fill the memory."""

MAX_EPOCH = 2**62
"""Far above all that a deployment counts to, and what is counted on from it still fits a message."""


@dataclass(slots=True)
class _Client:
    """The newest report of a client. heard_at: when it came. listed: whether the client lives, as far as is known."""

    report: ClientReport
    heard_at: float
    listed: bool


class ClientRegistry:
    """Lists a client from its first report until it leaves, its process ends, or it has been silent for too long.

    One record per client index, newest (incarnation, report_seq) wins. Records of clients that left are kept, so that
    a late report does not bring one back.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._records: dict[int, _Client] = {}

    def on_report(self, report: ClientReport, now: float) -> bool:
        """Take one report; True when the list changed."""
        client_id = report.info.client_id
        known = self._records.get(client_id.index)
        if known is None and len(self._records) >= MAX_CLIENTS:
            return False
        if known is not None and _client_order(report) <= _client_order(known.report):
            return False
        before = known.report.info if known is not None and known.listed else None
        record = _Client(report, now, listed=not report.leaving)
        self._records[client_id.index] = record
        return (report.info if record.listed else None) != before

    def on_gone(self, client_ids: Iterable[ClientId]) -> bool:
        """Take out clients whose process ended; True when the list changed."""
        changed = False
        for client_id in client_ids:
            record = self._records.get(client_id.index)
            if record is not None and record.listed and record.report.info.client_id == client_id:
                record.listed = False
                changed = True
        return changed

    def expire(self, now: float) -> bool:
        """Take out clients that are silent for too long; True when the list changed. A later report lists them again.

        Silence of a client takes it off the list, because engines must not compute for nobody; silence of an engine
        never declares a death.
        """
        changed = False
        for record in self._records.values():
            if record.listed and now - record.heard_at > self._silence_s:
                record.listed = False
                changed = True
        return changed

    def next_expiry(self) -> float:
        """Return when ``expire`` may next have something to do; infinity without clients."""
        heard = [record.heard_at for record in self._records.values() if record.listed]
        return min(heard) + self._silence_s if heard else float("inf")

    def live(self) -> list[ClientInfo]:
        """Return the listed clients in the order of their index."""
        return [self._records[index].report.info for index in sorted(self._records) if self._records[index].listed]


def _client_order(report: ClientReport) -> tuple[int, int]:
    return report.info.client_id.incarnation, report.report_seq


class CoordinatorState:
    """Keeps everybody's newest report and derives the group from them.

    Newest means highest (incarnation, report_seq) per rank, so loss, repetition and reordering need no other rule.
    The coordinator adds nothing up and declares no death: deaths are what the supervisor confirmed, and an engine that
    is merely silent stays a member with its last report. It does decide who is suspect, since it hears all of them.

    group_version, load_version: rise whenever the next GroupState or LoadSnapshot would say something new.
    """

    def __init__(
        self,
        generation: int,
        client_silence_s: float,
        stall_timeout_s: float,
        lockstep: LockstepConfig | None = None,
    ) -> None:
        self._generation = generation
        self._seq = 0
        self._failure_detector = FailureDetector(stall_timeout_s)
        self._clients = ClientRegistry(client_silence_s)
        self._reports: dict[int, EngineReport] = {}
        self._replicas: dict[int, ReplicaInfo] = {}
        self._dismissed: frozenset[EngineId] = frozenset()
        self._supervisor_seq = -1
        self._settings = ClusterSettings()
        self._membership = Membership(0, [])
        self._lockstep: LockstepGroup | None = None
        if lockstep is not None:
            self._lockstep = LockstepGroup(generation, lockstep.min_size, lockstep.num_redundant_experts)
        self.group_version = 0
        self.load_version = 0
        self.dropped: Counter[str] = Counter()

    def on_report(self, report: Report, now: float) -> None:
        """Take one report from anybody; an old one, or one that makes no sense, is counted and dropped."""
        if isinstance(report, EngineReport):
            self._on_engine(report, now)
        elif isinstance(report, ClientReport):
            self._on_client(report, now)
        else:
            self._on_supervisor(report, now)

    def expire(self, now: float) -> None:
        """Take out clients that have been silent for too long, and work out which engines are suspect."""
        clients_changed = self._clients.expire(now)
        suspects_changed = self._failure_detector.judge(now)
        if clients_changed or suspects_changed:
            self.group_version += 1

    def next_expiry(self, now: float) -> float:
        """Return when ``expire`` may next have something to do."""
        return min(self._clients.next_expiry(), self._failure_detector.next_deadline(now))

    @property
    def log_level(self) -> str:
        """Return the level that every process is to log at; empty leaves each at its own."""
        return self._settings.log_level

    def is_observed(self) -> bool:
        """Tell whether every member has shown in its report the current epoch, and the settings in force."""
        if self._lockstep is not None and not self._lockstep.is_observed:
            return False
        epoch, settings_seq = self._membership.epoch, self._settings.seq
        reports = [self._reports[m.rank] for m in self._membership.members if m.rank in self._reports]
        return all(r.max_epoch_seen >= epoch and r.settings_seq >= settings_seq for r in reports)

    def group_state(self) -> GroupState:
        """Return the next GroupState. Waves and proposals belong to lockstep groups; others are at rest there."""
        self._seq += 1
        group = self._lockstep
        return GroupState(
            generation=self._generation,
            seq=self._seq,
            committed=self._membership,
            proposal=None if group is None else group.proposal,
            direct=group is not None and group.direct,
            dismissed=sorted(self._dismissed),
            wave_started=0 if group is None else group.waves.started,
            clients=self._clients.live(),
            replicas=list(self._replicas.values()),
            settings=self._settings,
            suspects=list(self._failure_detector.suspects),
        )

    def load_snapshot(self) -> LoadSnapshot:
        """Return the next LoadSnapshot: the last report of every engine that is not known to be gone, verbatim."""
        self._seq += 1
        return LoadSnapshot(self._generation, self._seq, [self._reports[rank] for rank in sorted(self._reports)])

    # --- reports ----------------------------------------------------------------------------------------------------

    def _on_engine(self, report: EngineReport, now: float) -> None:
        engine_id = report.engine_id
        if not self._has_room(engine_id) or not self._is_listed(engine_id):
            self.dropped["engine report from nobody"] += 1
            return
        if report.max_epoch_seen > MAX_EPOCH:
            self.dropped["impossible engine report"] += 1
            return
        known = self._reports.get(engine_id.rank)
        if known is not None and _engine_order(report) <= _engine_order(known):
            self.dropped["old engine report"] += 1
            return
        self._reports[engine_id.rank] = report
        self._failure_detector.on_report(report, now)
        if known is None or _content(known) != _content(report):
            self.load_version += 1
        if self._lockstep is not None:
            self._update_lockstep(self._lockstep)
        elif (known is not None and known.engine_id != engine_id) or self._belongs(report) != self._is_member(
            engine_id
        ):
            self._refresh_members()

    def _on_client(self, report: ClientReport, now: float) -> None:
        if self._clients.on_report(report, now):
            self.group_version += 1
        if self._lockstep is None or self._settings.pause is not PauseMode.RUN or self._settings.sleep_level:
            return  # a group at rest by order is not woken for a request that it would not run
        if self._lockstep.on_first_request(report.wave_wanted):
            self.group_version += 1

    def _on_supervisor(self, report: SupervisorReport, now: float) -> None:
        if report.report_seq <= self._supervisor_seq or len(report.replicas) > MAX_REPLICAS:
            self.dropped["old supervisor report"] += 1
            return
        self._supervisor_seq = report.report_seq
        replicas = replicas_by_rank(report.replicas)
        dismissed = frozenset(report.dismissed)
        clients_changed = self._clients.on_gone(report.gone_clients)
        desired = (dismissed, report.settings)
        if replicas != self._replicas or desired != (self._dismissed, self._settings) or clients_changed:
            self._replicas = replicas
            if self._lockstep is not None:  # before the members are worked out, which places experts by it
                self._lockstep.rebalance(report.settings.rebalance_seq)
            self._dismissed, self._settings = desired
            self.group_version += 1
            self._forget_the_gone(now)
            self._refresh_members()

    # --- members ----------------------------------------------------------------------------------------------------

    def _forget_the_gone(self, now: float) -> None:
        self._failure_detector.on_replicas(self._replicas, now)
        gone = [rank for rank, report in self._reports.items() if not self._is_listed(report.engine_id)]
        for rank in gone:
            del self._reports[rank]
            self.load_version += 1

    def _update_lockstep(self, group: LockstepGroup) -> None:
        if group.update(self._reports, self._replicas):
            self._membership = group.committed
            self.group_version += 1

    def _refresh_members(self) -> None:
        if self._lockstep is not None:
            self._update_lockstep(self._lockstep)
            return
        members = sorted(report.engine_id for report in self._reports.values() if self._belongs(report))
        if members != self._membership.members:
            seen = max((report.max_epoch_seen for report in self._reports.values()), default=0)
            # An epoch names one membership for good: behind a restart it goes on above all that anybody has seen.
            self._membership = Membership(max(self._membership.epoch, seen) + 1, members)
            self.group_version += 1

    def _has_room(self, engine_id: EngineId) -> bool:
        return engine_id.rank in self._reports or len(self._reports) < MAX_REPLICAS

    def _is_listed(self, engine_id: EngineId) -> bool:
        """Tell whether the supervisor lists this engine. Before its list is known every engine may report."""
        if not self._replicas:
            return True
        replica = self._replicas.get(engine_id.rank)
        if replica is None or engine_id.incarnation < replica.engine_id.incarnation:
            return False
        return engine_id != replica.engine_id or replica.state != ReplicaState.DEAD

    def _is_member(self, engine_id: EngineId) -> bool:
        return engine_id in self._membership.members

    def _belongs(self, report: EngineReport) -> bool:
        return report.phase in SERVING and report.engine_id not in self._dismissed


def _engine_order(report: EngineReport) -> tuple[int, int]:
    return report.engine_id.incarnation, report.report_seq


def _content(report: EngineReport) -> tuple[object, ...]:
    """Return everything but who sent it and which number it has: the two leading fields."""
    return astuple(report)[2:]
