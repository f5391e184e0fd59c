"""The parts of a world: ranks, connections, the coordinator, and the keys by which one differs from another.

The ranks' ``DPGroupMember`` and the coordinator's ``LockstepGroup`` are the real ones. Everything else of a process
is here as far as it decides what can happen.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.parallel.group_member import DPGroupMember
from engine.wire.control import ClusterSettings, Membership, MemberStatus, PauseMode
from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport, GroupState
from engine.wire.replicas import ReplicaInfo, any_has_ended
from engine.wire.states import EnginePhase, LockstepState
from lb.coordinator.lockstep_group import LockstepGroup

NUM_EXPERTS = 3

_PHASES = {
    LockstepState.OUTSIDE: EnginePhase.IDLE,
    LockstepState.IDLE: EnginePhase.IDLE,
    LockstepState.RUNNING: EnginePhase.RUNNING,
    LockstepState.PARKED: EnginePhase.PARKED,
}


class Collective(NamedTuple):
    """The collective a rank waits in. is_rows: one that stands for all of a step's layers, not the exchange before."""

    epoch: int
    position: int
    is_rows: bool


def shallow_copy(thing: Any) -> Any:
    """Return a shallow copy of an object that replaces, and never changes, what its attributes refer to."""
    copied = object.__new__(type(thing))
    copied.__dict__.update(thing.__dict__)
    return copied


def _twin_of(member: DPGroupMember) -> DPGroupMember:
    copied: DPGroupMember = shallow_copy(member)
    copied._newest = copy(member._newest)  # the one thing that a member changes in place
    return copied


def _epoch_of(membership: Membership | None) -> int:
    return 0 if membership is None else membership.epoch


@dataclass(slots=True)
class Rank:
    """One engine's process.

    slot: number of a state that its input thread has and its loop has not taken. seen: number of the newest it got.
    leaves_below: epoch below which groups are to be left, by one of these states. standby: epoch of the group that is
    ready beside. result: of a preparation that is over, not taken by the loop yet. switches: the step it is in is its
    group's last. settings: how often pause and resume were seen; odd while paused.
    """

    engine_id: EngineId
    member: DPGroupMember
    is_loaded: bool = True
    has_work: bool = False
    settings: int = 0
    slot: int = -1
    seen: int = -1
    leaves_below: int = 0
    preparing: int = 0
    result: bool | None = None
    is_waited_for: bool = False
    standby: int = 0
    failed_epoch: int = 0
    place: Collective | None = None
    switches: bool = False
    replicas: Mapping[int, ReplicaInfo] = field(default_factory=dict)
    cached_key: int = 0
    cached_report_key: tuple[Any, ...] | None = None

    def copy(self) -> "Rank":
        """Return a rank that can be changed."""
        return Rank(
            self.engine_id,
            _twin_of(self.member),
            self.is_loaded,
            self.has_work,
            self.settings,
            self.slot,
            self.seen,
            self.leaves_below,
            self.preparing,
            self.result,
            self.is_waited_for,
            self.standby,
            self.failed_epoch,
            self.place,
            self.switches,
            self.replicas,
        )

    def has_lost_peer(self, epochs: Mapping[int, Membership], epoch: int) -> bool:
        """Tell whether its input thread knows that a member of an epoch is gone."""
        return epoch in epochs and any_has_ended(epochs[epoch].members, self.replicas)

    @property
    def is_paused(self) -> bool:
        """Tell whether it may not step."""
        return self.settings % 2 == 1

    def report(self) -> EngineReport:
        """Return what its input thread would report now."""
        member = self.member
        if not self.is_loaded:
            return EngineReport(self.engine_id, 0, 0, 0, 0, 0, EnginePhase.LOADING, 0, False, {}, _LOADS[0])
        return EngineReport(
            self.engine_id,
            0,
            member.epoch,
            member.ready_epoch,
            member.max_epoch_seen,
            member.wave,
            _PHASES[member.lockstep_state],
            0,
            self.has_work and not self.is_paused,
            {},
            _LOADS[self.has_work],
            member=MemberStatus(
                NUM_EXPERTS,
                f"h:{self.engine_id.rank}",
                member.committed,
                self.failed_epoch,
                [2, 1, 1],
                broken_epoch=member.broken_epoch,
            ),
        )

    def report_key(self) -> tuple[Any, ...]:
        """Return the key of its next report."""
        if self.cached_report_key is None:
            self.cached_report_key = report_key(self.report())
        return self.cached_report_key

    def key(self) -> int:
        """Return a hash of all but the numbers of states and of steps."""
        if not self.cached_key:
            m = self.member
            self.cached_key = hash(
                (
                    self.engine_id.incarnation,
                    m.lockstep_state.value,
                    m.epoch,
                    m.ready_epoch,
                    m.max_epoch_seen,
                    m.wave,
                    m._wave_seen,
                    m.generation + 2,
                    m.committed.epoch,
                    m.broken_epoch,
                    _epoch_of(m._proposal),
                    m._leaves_below,
                    self.is_loaded,
                    self.has_work,
                    self.settings,
                    self.leaves_below,
                    self.preparing,
                    self.result,
                    self.is_waited_for,
                    self.standby,
                    self.failed_epoch,
                    None if self.place is None else (self.place.epoch, self.place.is_rows),
                    self.switches,
                )
            )
        return self.cached_key


_LOADS = (Load(), Load(num_running=1))


@dataclass(slots=True)
class Group:
    """The connections of one epoch. begun: members that came to connect. entered: collectives each began since.

    posts: what was sent into the collectives that somebody may still take, by position and member. gone: members that
    died or let go. cut: members that let go unnoticed. verdict: the decision of the newest completed exchange, as the
    first to take it saw it.
    """

    membership: Membership
    begun: frozenset[EngineId] = frozenset()
    gone: frozenset[EngineId] = frozenset()
    cut: frozenset[EngineId] = frozenset()
    entered: tuple[int, ...] = ()
    posts: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    verdict: tuple[int, Any] = (-1, None)
    cached_keys: dict[int, tuple[Any, ...]] | None = None

    @property
    def is_met(self) -> bool:
        """Tell whether all members came, so that it can be stepped in."""
        return len(self.begun) == len(self.membership.members)

    def is_complete(self, position: int) -> bool:
        """Tell whether everybody has entered a collective."""
        return min(self.entered) > position

    def copy(self) -> "Group":
        """Return connections that can be changed."""
        return Group(self.membership, self.begun, self.gone, self.cut, self.entered, self.posts, self.verdict)

    def keys(self) -> dict[int, tuple[Any, ...]]:
        """Return a key by rank: all but the numbers of steps, and for positions only which member is ahead."""
        if self.cached_keys is None:
            base = min(self.entered)
            newest = self.verdict[0] - base
            self.cached_keys = {
                member.rank: (
                    self.membership.epoch,
                    member.incarnation,
                    member in self.begun,
                    member in self.gone,
                    member in self.cut,
                    self.entered[index] - base,
                    newest,
                    tuple((at - base, _post_key(row[index])) for at, row in self.posts),
                )
                for index, member in enumerate(self.membership.members)
            }
        return self.cached_keys


def _post_key(post: Any) -> Any:
    return post if post is None or post == () else (post.wave, *post[3:])


@dataclass(slots=True)
class Coordinator:
    """The coordinator's process: its group, the reports and replicas it has, and the operator's settings it knows."""

    generation: int
    group: LockstepGroup
    reports: dict[int, EngineReport] = field(default_factory=dict)
    replicas: dict[int, ReplicaInfo] = field(default_factory=dict)
    settings: int = 0
    rebalances: int = 0
    num_states: int = 0
    cached_key: int = 0

    def key(self) -> int:
        """Return a hash of all that concerns no rank alone."""
        if not self.cached_key:
            group = self.group
            self.cached_key = hash(
                (
                    self.generation,
                    group.committed.epoch,
                    _epoch_of(group.proposal),
                    group.direct,
                    group.waves.started,
                    group._max_epoch,
                    self.settings,
                    self.rebalances,
                )
            )
        return self.cached_key

    def key_of(self, rank: int) -> tuple[Any, ...]:
        """Return a key of all that it knows of a rank."""
        report = self.reports.get(rank)
        return None if report is None else report_key(report), replica_key(self.replicas.get(rank))


def replica_key(replica: ReplicaInfo | None) -> tuple[int, int] | None:
    return None if replica is None else (replica.engine_id.incarnation, int(replica.state))


def report_key(report: EngineReport) -> tuple[Any, ...]:
    """Return all of a report that decides what can happen."""
    member = report.member
    return (
        report.engine_id.incarnation,
        report.epoch,
        report.ready_epoch,
        report.max_epoch_seen,
        report.wave,
        int(report.phase),
        report.has_work,
        report.load.num_running,
        None if member is None else (member.membership.epoch, member.failed_epoch, member.broken_epoch),
    )


def state_key(state: GroupState) -> tuple[Any, ...]:
    return (
        state.generation,
        state.committed.epoch,
        _epoch_of(state.proposal),
        state.direct,
        state.wave_started,
        state.settings.seq,
    )


def settings_after(num_changes: int) -> ClusterSettings:
    """Return what the operator wants who has paused and resumed so often, the pause first."""
    return ClusterSettings(num_changes, PauseMode.KEEP if num_changes % 2 else PauseMode.RUN)


def replica_in(state: GroupState, rank: int) -> ReplicaInfo | None:
    return next((replica for replica in state.replicas if replica.engine_id.rank == rank), None)
