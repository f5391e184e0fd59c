"""The deployment as a scale operation observes it, and the actions it can take on a rank. Plain data, pure.

``observe`` makes the observation from four sources: the replicas, the published state of the group, the placement
groups that were asked for, and the engines that the API processes reach.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import ReplicaState
from orchestrator.ranks.replica_table import Replica
from orchestrator.scaling.plan import ScalePlan


class PlacementState(StrEnum):
    """Whether the host holds a placement group for a rank."""

    NONE = "none"
    ASKED = "asked"
    HELD = "held"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement group of one rank. reason: why it was refused."""

    state: PlacementState
    reason: str = ""


class GroupStage(IntEnum):
    """How far a lockstep group is on its way to the target membership; each stage includes those before it.

    Independent ranks are always at SWITCHED.
    """

    OLD = 0
    PREPARED = 1  # all members, old and new, are ready to switch
    COMMITTED = 2  # the switch cannot be taken back
    SWITCHED = 3  # all members step in the new group


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """One rank, as it is now.

    engine: STARTING from the action that starts it, ALIVE once it has loaded, DEAD when it ended; None before.
    progress: of loading, 0..1. is_reached: by every API process. is_empty: it accepts no requests and has none left.
    num_sequences: waiting and running ones. is_member: a lockstep group still counts on it. is_silent: no reports
    arrive from its engine, which therefore acts on no published state either.
    reason: why the placement group was refused or the engine ended.
    """

    placement: PlacementState = PlacementState.NONE
    engine: ReplicaState | None = None
    progress: float = 0.0
    is_reached: bool = False
    is_empty: bool = False
    num_sequences: int = 0
    is_member: bool = False
    is_silent: bool = False
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Tell whether no engine of this rank lives."""
        return self.engine in (None, ReplicaState.DEAD)


_NOTHING = ObservedRank()


@dataclass(frozen=True, slots=True)
class ObservedState:
    """The deployment, as it is now.

    healing: staying ranks whose engine is being replaced. group: see ``GroupStage``. is_served: some rank that does not
    leave is ready.
    """

    ranks: Mapping[int, ObservedRank] = field(default_factory=dict)
    healing: tuple[int, ...] = ()
    group: GroupStage = GroupStage.SWITCHED
    is_served: bool = True

    def of(self, rank: int) -> ObservedRank:
        """Return what is known of a rank."""
        return self.ranks.get(rank, _NOTHING)


class ActionKind(StrEnum):
    """What a scale operation can do to a rank. Each takes effect in the observed state some time later, or never.

    RESERVE: ask the host for its placement group. SPAWN: start its engine, in a replica that is not replaced by itself.
    ADMIT: its replica is like any other from now on. CORDON: send it no new requests. MIGRATE: let its sequences
    continue on other ranks. LEAVE: let the group continue without it. STOP: dismiss its engine. KILL: end it at once.
    RELEASE: give up its placement group and its replica. RESTORE: undo CORDON, MIGRATE and LEAVE.
    """

    RESERVE = "reserve"
    SPAWN = "spawn"
    ADMIT = "admit"
    CORDON = "cordon"
    MIGRATE = "move"
    LEAVE = "leave"
    STOP = "stop"
    KILL = "kill"
    RELEASE = "release"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do to one rank."""

    kind: ActionKind
    rank: int


def observe(
    plan: ScalePlan,
    replicas: Iterable[Replica],
    group_state: GroupState | None,
    placements: Mapping[int, Placement],
    reached: Collection[EngineId],
    *,
    is_lockstep: bool,
) -> ObservedState:
    """Return the deployment as a plan is concerned with it.

    replicas: all there are. group_state: the newest that was received. placements: by rank, those that the operation
    asked for. reached: engines that every API process can send requests to.
    """
    by_rank = {replica.engine_id.rank: replica for replica in replicas}
    remaining = [replica for rank, replica in by_rank.items() if rank not in plan.leaving]
    concerned = {*plan.joining, *plan.leaving}
    membership = group_state if is_lockstep else None
    ranks = {}
    for rank in concerned:
        replica = by_rank.get(rank)
        # A rank that has left keeps its placement group, as the operation sees it, until it is published no more:
        # whoever asks for the ranks after a scale operation must not see one that is gone.
        has_placement = replica is not None or is_published(rank, group_state)
        default = Placement(PlacementState.HELD if has_placement else PlacementState.NONE)
        placement = placements.get(rank, default)
        observed = ObservedRank(placement=placement.state, reason=placement.reason)
        if replica is not None:
            observed = _with_replica(
                observed,
                replica,
                is_reached=replica.engine_id in reached,
                is_member=is_member(replica.engine_id, membership, remaining),
            )
        ranks[rank] = observed
    return ObservedState(
        ranks,
        healing=tuple(rank for rank, replica in by_rank.items() if rank not in concerned and is_healing(replica)),
        group=group_stage(membership, remaining) if is_lockstep else GroupStage.SWITCHED,
        is_served=any(replica.is_ready for replica in remaining),
    )


def _with_replica(observed: ObservedRank, replica: Replica, *, is_reached: bool, is_member: bool) -> ObservedRank:
    return replace(
        observed,
        engine=engine_state(replica),
        progress=replica.progress,
        is_reached=is_reached,
        is_empty=replica.is_empty,
        num_sequences=replica.num_sequences,
        is_member=is_member,
        is_silent=replica.suspect is not None and replica.suspect.is_silent,
        reason=replica.end_reason or observed.reason,
    )


def is_published(rank: int, state: GroupState | None) -> bool:
    """Tell whether the replica of a rank is in the published state, and so in ``/v1/cluster`` and ``/metrics``."""
    return state is not None and any(replica.engine_id.rank == rank for replica in state.replicas)


def engine_state(replica: Replica) -> ReplicaState:
    """Return how far the engine in a replica is."""
    if replica.exit is not None:
        return ReplicaState.DEAD
    return ReplicaState.ALIVE if replica.is_ready else ReplicaState.STARTING


def is_healing(replica: Replica) -> bool:
    """Tell whether a replica will have an engine that serves, and has none now."""
    return not replica.is_ready and not replica.is_lost


def group_stage(state: GroupState | None, replicas: Sequence[Replica]) -> GroupStage:
    """Return how far a lockstep group is on its way to the members that these replicas have."""
    ready = [replica for replica in replicas if replica.is_ready]
    members = sorted(replica.engine_id for replica in ready)
    reports = [replica.report for replica in ready if replica.report is not None]
    if state is None:
        return GroupStage.OLD
    if sorted(state.committed.members) == members:
        # Committed is the coordinator's word, switched the members': each reports the epoch that it steps in.
        has_switched = all(report.epoch == state.committed.epoch for report in reports)
        return GroupStage.SWITCHED if has_switched else GroupStage.COMMITTED
    proposal = state.proposal
    if proposal is None or sorted(proposal.members) != members:
        return GroupStage.OLD
    return GroupStage.PREPARED if all(report.ready_epoch == proposal.epoch for report in reports) else GroupStage.OLD


def is_member(engine_id: EngineId, state: GroupState | None, replicas: Sequence[Replica]) -> bool:
    """Tell whether a lockstep group counts on an engine, or still may: until all others step without it.

    state: None when ranks are independent. replicas: those that stay and those that are new.
    """
    if state is None:
        return False
    # A coordinator proposes an engine until the replicas that it has received mark it as leaving, and one that has
    # just started (epoch 0) does not know yet which group there is: in both cases its committed members prove nothing.
    if not state.committed.epoch or any(
        replica.engine_id == engine_id and _may_join(replica) for replica in state.replicas
    ):
        return any(replica.report is not None and replica.report.epoch > 0 for replica in replicas)
    reports = [replica.report for replica in replicas if replica.report is not None and replica.engine_id != engine_id]
    return engine_id in state.committed.members or any(report.epoch < state.committed.epoch for report in reports)


def _may_join(replica: ReplicaInfo) -> bool:
    return replica.state in (ReplicaState.STARTING, ReplicaState.ALIVE)
