"""From replicas, reports and the group's state to the facts an operation decides by. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import ReplicaState
from orchestrator.ranks.engine_group import EngineGroup
from orchestrator.ranks.replica_table import Replica
from orchestrator.scaling.observed_state import GroupStage, ObservedRank, ObservedState
from orchestrator.scaling.placement_groups import PlacementGroups
from orchestrator.scaling.plan import ScalePlan


def observe(
    plan: ScalePlan,
    engines: EngineGroup,
    placement_groups: PlacementGroups,
    reached: Collection[EngineId],
    is_lockstep: bool,
) -> ObservedState:
    """Return the facts as they are now. reached: engines that every API process can send requests to."""
    state = engines.group_state if is_lockstep else None
    concerned = {*plan.joining, *plan.leaving}
    wanted = [replica for replica in engines.replicas if replica.engine_id.rank not in plan.leaving]
    ranks = {}
    for rank in concerned:
        replica = engines.replicas.at(rank)
        placement = placement_groups.of(
            rank, has_replica=replica is not None or is_published(rank, engines.group_state)
        )
        known = ObservedRank(placement=placement, reason=placement_groups.reason(rank))
        if replica is not None:
            is_counted_on = is_member(replica.engine_id, state, wanted)
            known = _with_replica(known, replica, is_reached=replica.engine_id in reached, is_member=is_counted_on)
        ranks[rank] = known
    healing = tuple(
        replica.engine_id.rank
        for replica in engines.replicas
        if replica.engine_id.rank not in concerned and is_healing(replica)
    )
    group = group_stage(state, wanted) if is_lockstep else GroupStage.SWITCHED
    return ObservedState(ranks, healing, group, is_served=any(replica.is_ready for replica in wanted))


def _with_replica(known: ObservedRank, replica: Replica, *, is_reached: bool, is_member: bool) -> ObservedRank:
    return replace(
        known,
        engine=engine_state(replica),
        progress=replica.progress,
        is_reached=is_reached,
        is_empty=replica.is_empty,
        num_sequences=replica.num_sequences,
        is_member=is_member,
        is_silent=replica.suspect is not None and replica.suspect.is_silent,
        reason=replica.end_reason or known.reason,
    )


def is_published(rank: int, state: GroupState | None) -> bool:
    """Tell whether the replica of a rank is shown to clients; who asks after a scale shall not see what has left."""
    return state is not None and any(replica.engine_id.rank == rank for replica in state.replicas)


def engine_state(replica: Replica) -> ReplicaState:
    """Return how far the engine in a replica is."""
    if replica.exit is not None:
        return ReplicaState.DEAD
    return ReplicaState.ALIVE if replica.is_ready else ReplicaState.STARTING


def is_healing(replica: Replica) -> bool:
    """Tell whether a replica will have an engine that serves, and has none now."""
    return not replica.is_ready and not replica.is_lost


def group_stage(state: GroupState | None, wanted: Sequence[Replica]) -> GroupStage:
    """Return how far a lockstep group is on its way to the members that are wanted."""
    members = sorted(replica.engine_id for replica in wanted if replica.is_ready)
    reports = [replica.report for replica in wanted if replica.is_ready and replica.report is not None]
    if state is None:
        return GroupStage.OLD
    if sorted(state.committed.members) == members:
        has_switched = all(report.epoch == state.committed.epoch for report in reports)
        return GroupStage.SWITCHED if has_switched else GroupStage.COMMITTED
    proposal = state.proposal
    if proposal is None or sorted(proposal.members) != members:
        return GroupStage.OLD
    return GroupStage.PREPARED if all(report.ready_epoch == proposal.epoch for report in reports) else GroupStage.OLD


def is_member(engine_id: EngineId, state: GroupState | None, wanted: Sequence[Replica]) -> bool:
    """Tell whether a lockstep group counts on an engine, or still may: until those that stay step without it.

    The coordinator proposes no newcomer of which it knows that it is to leave; one that has just started does not know
    which group there is.
    """
    if state is None:
        return False
    if not state.committed.epoch or any(
        replica.engine_id == engine_id and _may_join(replica) for replica in state.replicas
    ):
        return any(replica.report is not None and replica.report.epoch > 0 for replica in wanted)
    reports = [replica.report for replica in wanted if replica.report is not None and replica.engine_id != engine_id]
    return engine_id in state.committed.members or any(report.epoch < state.committed.epoch for report in reports)


def _may_join(replica: ReplicaInfo) -> bool:
    return replica.state in (ReplicaState.STARTING, ReplicaState.ALIVE)
