"""The way back of a scale operation: new ranks go, each by itself; those that were to leave stay. Pure."""

from engine.wire.states import ReplicaState
from orchestrator.scaling.observed_state import (
    Action,
    ActionKind,
    ObservedRank,
    ObservedState,
    PlacementState,
)
from orchestrator.scaling.plan import ScalePlan
from orchestrator.scaling.steps import ScaleDeadlines


class Rollback:
    """Undoes what an operation did before its point of no return; nothing in here can fail.

    A new rank may already serve: picks use it as soon as it is ready. So what it has moves before it goes. One that is
    silent moves nothing: it is killed, and what it has goes on elsewhere as after any death.
    """

    def __init__(self, plan: ScalePlan, deadlines: ScaleDeadlines) -> None:
        self._plan = plan
        self._deadlines = deadlines
        self._migrating_since: dict[int, float] = {}
        self._stopping_since: dict[int, float] = {}

    def advance(self, observed: ObservedState, now: float) -> list[Action]:
        """Return what is to be done now; orders are repeated until they have had their effect."""
        actions = [Action(ActionKind.RESTORE, rank) for rank in self._plan.leaving]
        for rank in self._plan.joining:
            actions += [Action(kind, rank) for kind in self._undo(rank, observed.of(rank), now)]
        return actions

    def missing(self, observed: ObservedState) -> tuple[int, ...]:
        """Return the new ranks of which something is left."""
        return tuple(rank for rank in self._plan.joining if not _is_gone(observed.of(rank)))

    def _undo(self, rank: int, known: ObservedRank, now: float) -> list[ActionKind]:
        if _is_gone(known):
            return []
        if known.is_over:
            return [ActionKind.RELEASE]
        if known.engine is ReplicaState.STARTING or known.is_silent:
            return [ActionKind.KILL]
        return self._empty_and_stop(rank, known, now)

    def _empty_and_stop(self, rank: int, known: ObservedRank, now: float) -> list[ActionKind]:
        has_time = now - self._migrating_since.setdefault(rank, now) < self._deadlines.migrate_s
        if has_time and (known.is_member or not known.is_empty):
            return [ActionKind.CORDON, ActionKind.MIGRATE, ActionKind.LEAVE]
        is_late = now - self._stopping_since.setdefault(rank, now) >= self._deadlines.stop_s
        return [ActionKind.STOP, ActionKind.KILL] if is_late else [ActionKind.STOP]


def _is_gone(known: ObservedRank) -> bool:
    return known.placement is PlacementState.NONE and known.is_over
