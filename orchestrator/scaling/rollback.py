"""The rollback of a scale operation: new ranks are removed, leaving ranks accept requests again. Pure."""

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

    A new rank may already serve: picks use it as soon as it is ready. So its sequences migrate before it is stopped.
    """

    def __init__(self, plan: ScalePlan, deadlines: ScaleDeadlines) -> None:
        self._plan = plan
        self._deadlines = deadlines
        self._migrating_since: dict[int, float] = {}
        self._stopping_since: dict[int, float] = {}

    def advance(self, observed: ObservedState, now: float) -> list[Action]:
        """Return the actions to take now; each is repeated until it has had its effect."""
        actions = [Action(ActionKind.RESTORE, rank) for rank in self._plan.leaving]
        for rank in self._plan.joining:
            actions += [Action(kind, rank) for kind in self._undo(rank, observed.of(rank), now)]
        return actions

    def missing(self, observed: ObservedState) -> tuple[int, ...]:
        """Return the new ranks of which something is left."""
        return tuple(rank for rank in self._plan.joining if not _is_gone(observed.of(rank)))

    def _undo(self, rank: int, observed: ObservedRank, now: float) -> list[ActionKind]:
        if _is_gone(observed):
            return []
        if observed.is_over:
            return [ActionKind.RELEASE]
        # An engine that loads has no sequences, and a silent one hands none over: its clients requeue them as after
        # any other death. Waiting for either would block the next operation for nothing.
        if observed.engine is ReplicaState.STARTING or observed.is_silent:
            return [ActionKind.KILL]
        return self._empty_and_stop(rank, observed, now)

    def _empty_and_stop(self, rank: int, observed: ObservedRank, now: float) -> list[ActionKind]:
        has_time = now - self._migrating_since.setdefault(rank, now) < self._deadlines.migrate_s
        if has_time and (observed.is_member or not observed.is_empty):
            return [ActionKind.CORDON, ActionKind.MIGRATE, ActionKind.LEAVE]
        is_late = now - self._stopping_since.setdefault(rank, now) >= self._deadlines.stop_s
        return [ActionKind.STOP, ActionKind.KILL] if is_late else [ActionKind.STOP]


def _is_gone(observed: ObservedRank) -> bool:
    return observed.placement is PlacementState.NONE and observed.is_over
