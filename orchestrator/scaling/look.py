"""From seats, reports and the group's state to the facts an operation decides by. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from engine.wire.ids import EngineId
from engine.wire.messages import GroupState, Seat, SeatState
from orchestrator.engine_group import EngineGroup
from orchestrator.scaling.facts import EngineStage, Facts, GroupStage, RankFacts
from orchestrator.scaling.places import Places
from orchestrator.scaling.plan import ScalePlan
from orchestrator.seats import SeatStatus


def look(
    plan: ScalePlan, engines: EngineGroup, places: Places, reached: Collection[EngineId], is_lockstep: bool
) -> Facts:
    """Return the facts as they are now. reached: engines that every API process can send requests to."""
    state = engines.group_state if is_lockstep else None
    concerned = {*plan.joining, *plan.leaving}
    wanted = [seat for seat in engines.seats if seat.engine_id.rank not in plan.leaving]
    ranks = {}
    for rank in concerned:
        seat = engines.seats.at(rank)
        place = places.of(rank, has_seat=seat is not None or is_published(rank, engines.group_state))
        known = RankFacts(place=place, reason=places.reason(rank))
        if seat is not None:
            is_counted_on = is_member(seat.engine_id, state, wanted)
            known = _with_seat(known, seat, is_reached=seat.engine_id in reached, is_member=is_counted_on)
        ranks[rank] = known
    healing = tuple(
        seat.engine_id.rank for seat in engines.seats if seat.engine_id.rank not in concerned and is_healing(seat)
    )
    group = group_stage(state, wanted) if is_lockstep else GroupStage.SWITCHED
    return Facts(ranks, healing, group, is_served=any(seat.is_ready for seat in wanted))


def _with_seat(known: RankFacts, seat: SeatStatus, *, is_reached: bool, is_member: bool) -> RankFacts:
    return replace(
        known,
        engine=engine_stage(seat),
        progress=seat.progress,
        is_reached=is_reached,
        is_empty=seat.is_empty,
        num_sequences=seat.num_sequences,
        is_member=is_member,
        is_silent=seat.suspect is not None and seat.suspect.is_silent,
        reason=seat.end_reason or known.reason,
    )


def is_published(rank: int, state: GroupState | None) -> bool:
    """Tell whether the seat of a rank is shown to clients; who asks after a scale shall not see what has left."""
    return state is not None and any(seat.engine_id.rank == rank for seat in state.seats)


def engine_stage(seat: SeatStatus) -> EngineStage:
    """Return how far the engine in a seat is."""
    if seat.exit is not None:
        return EngineStage.ENDED
    return EngineStage.READY if seat.is_ready else EngineStage.STARTING


def is_healing(seat: SeatStatus) -> bool:
    """Tell whether a seat will have an engine that serves, and has none now."""
    return not seat.is_ready and not seat.is_lost


def group_stage(state: GroupState | None, wanted: Sequence[SeatStatus]) -> GroupStage:
    """Return how far a lockstep group is on its way to the members that are wanted."""
    members = sorted(seat.engine_id for seat in wanted if seat.is_ready)
    reports = [seat.report for seat in wanted if seat.is_ready and seat.report is not None]
    if state is None:
        return GroupStage.OLD
    if sorted(state.committed.members) == members:
        has_switched = all(report.epoch == state.committed.epoch for report in reports)
        return GroupStage.SWITCHED if has_switched else GroupStage.COMMITTED
    proposal = state.proposal
    if proposal is None or sorted(proposal.members) != members:
        return GroupStage.OLD
    return GroupStage.PREPARED if all(report.ready_epoch == proposal.epoch for report in reports) else GroupStage.OLD


def is_member(engine_id: EngineId, state: GroupState | None, wanted: Sequence[SeatStatus]) -> bool:
    """Tell whether a lockstep group counts on an engine, or still may: until those that stay step without it.

    The coordinator proposes no newcomer of which it knows that it is to leave; one that has just started does not know
    which group there is.
    """
    if state is None:
        return False
    if not state.committed.epoch or any(seat.engine_id == engine_id and _may_join(seat) for seat in state.seats):
        return any(seat.report is not None and seat.report.epoch > 0 for seat in wanted)
    reports = [seat.report for seat in wanted if seat.report is not None and seat.engine_id != engine_id]
    return engine_id in state.committed.members or any(report.epoch < state.committed.epoch for report in reports)


def _may_join(seat: Seat) -> bool:
    return seat.state in (SeatState.STARTING, SeatState.ALIVE)
