"""A scale operation as a state machine: observed state and ``now`` in, actions out. Pure.

Forward it goes through the steps of its plan (``steps.py``); before the point of no return a failure or a cancel turns
it into a rollback (``rollback.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.wire.ids import name_ranks
from engine.wire.states import ReplicaState
from orchestrator.scaling.observed_state import Action, ActionKind, ObservedState, PlacementState
from orchestrator.scaling.plan import RefusalKind, ScalePlan, ScaleRefusedError, ScaleRequest
from orchestrator.scaling.rollback import Rollback
from orchestrator.scaling.steps import ENDS, Phase, ScaleDeadlines, Step, steps_of

_POINT_OF_NO_RETURN = (Phase.SWITCH, Phase.STOP)
_LEAVING_ACTIONS = (ActionKind.CORDON, ActionKind.MIGRATE, ActionKind.LEAVE)


@dataclass(slots=True)
class PhaseRecord:
    """One phase, past or present. since_s: from the start of the operation. duration_s: None while it lasts."""

    phase: Phase
    since_s: float
    duration_s: float | None = None


class ScaleOperation:
    """Takes a deployment from one set of ranks to another, or back to where it was.

    New ranks come first, then those that leave go; so at every moment the smaller of the two sizes serves. Until the
    point of no return any failure, and ``cancel``, undoes what was done: new ranks are removed, and leaving ranks
    accept requests again. Behind it nothing can fail any more, only take long.

    created_at: Unix time, for people. phase, error, blocking_ranks: of now; the last are those that the phase waits
    for. history: phases in their order. is_committed: it is behind its point of no return.
    """

    def __init__(
        self,
        operation_id: str,
        key: str | None,
        request: ScaleRequest,
        plan: ScalePlan,
        is_lockstep: bool,
        deadlines: ScaleDeadlines,
        now: float,
        created_at: float = 0.0,
    ) -> None:
        """Begin at ``now`` (monotonic seconds, as in ``advance``). key: the idempotency key, if the caller gave one."""
        self.id = operation_id
        self.key = key
        self.request = request
        self.plan = plan
        self.created_at = created_at
        self.error: str | None = None
        self.history: list[PhaseRecord] = []
        self.blocking_ranks: tuple[int, ...] = ()
        self.is_committed = False
        self._steps = steps_of(plan, is_lockstep, request.drain_timeout_s, deadlines)
        self._deadlines = deadlines
        self._index = 0
        self._started_at = now
        self._phase_began_at = now
        self._step_progress = 0.0
        self._issued: set[Action] = set()
        self._rollback: Rollback | None = None
        self._end_of_rollback = Phase.FAILED
        self._enter(self._steps[0].phase if self._steps else Phase.DONE, now)

    @property
    def phase(self) -> Phase:
        """Return what it is doing."""
        return self.history[-1].phase

    @property
    def is_over(self) -> bool:
        """Tell whether it has ended, one way or another."""
        return self.phase in ENDS

    @property
    def progress(self) -> float:
        """Return how far it is, 0..1; while it is rolled back, how far it had come."""
        if self.phase is Phase.DONE:
            return 1.0
        total = sum(step.weight for step in self._steps)
        done = sum(step.weight for step in self._steps[: self._index])
        current = self._steps[self._index].weight if self._index < len(self._steps) else 0.0
        return (done + current * self._step_progress) / total if total else 1.0

    def elapsed_s(self, now: float) -> float:
        """Return how long it has taken, or took."""
        last = self.history[-1]
        return last.since_s if self.is_over else now - self._started_at

    def eta_s(self, now: float) -> float | None:
        """Estimate how long it will still take, from how long it took so far; None while there is nothing to go by."""
        if self.is_over:
            return 0.0
        if self._rollback is not None or self.progress <= 0.0:
            return None
        return self.elapsed_s(now) * (1.0 - self.progress) / self.progress

    def cancel(self) -> None:
        """Ask for the rollback, which ``advance`` carries out. Asking again changes nothing.

        Raises:
            ScaleRefusedError: it is over, or behind the point of no return.
        """
        if self.is_over:
            raise ScaleRefusedError(RefusalKind.CONFLICT, f"operation {self.id} is over: {self.phase}")
        if self.is_committed:
            message = f"operation {self.id} is in phase {self.phase}, from where it can only go on"
            raise ScaleRefusedError(RefusalKind.CONFLICT, message)
        self._begin_rollback(Phase.CANCELLED, None)

    def fail(self, reason: str) -> None:
        """Roll back for a reason that is not in the observed state; no effect behind the point of no return."""
        if not self.is_over and not self.is_committed:
            self._begin_rollback(Phase.FAILED, reason)

    def advance(self, observed: ObservedState, now: float) -> list[Action]:
        """Return the actions to take now, each once. now: monotonic seconds."""
        actions: list[Action] = []
        # Several phases may end in one call: what they wait for can be there already.
        while not self.is_over:
            before = self.phase
            if self._rollback is None:
                actions += self._advance_step(observed, now)
            else:
                actions += self._advance_rollback(self._rollback, observed, now)
            if self.phase is before:
                break
        return actions

    # --- forward ----------------------------------------------------------------------------------------------------

    def _advance_step(self, observed: ObservedState, now: float) -> list[Action]:
        step = self._steps[self._index]
        failure = self._find_failure(observed)
        if failure is not None:
            return self._fail_step(failure, observed, now)
        if step.waits_for_healing and observed.healing:
            # Nobody leaves while a staying rank is away: together they could be all that serve.
            actions = [] if observed.is_served else self._restore_leaving(now)
            self.blocking_ranks, self._phase_began_at = observed.healing, now
            return actions
        actions = self._once(step.actions + self._kill_overdue(step, observed, now))
        self.blocking_ranks = tuple(rank for rank in step.ranks if not step.is_done(observed.of(rank)))
        # Never less than before: what is observed may fall back for a moment, a progress bar must not.
        self._step_progress = max(self._step_progress, _progress_of(step, observed, now - self._phase_began_at))
        if not self.blocking_ranks and step.is_group_done(observed):
            return actions + self._enter_next_step(now)
        return actions + self._check_limit(step, observed, now)

    def _restore_leaving(self, now: float) -> list[Action]:
        """Let the leaving ranks accept requests while nobody else serves, and go back to where they begin to leave."""
        issued = {action for action in self._issued if action.kind in _LEAVING_ACTIONS}
        if not issued:
            return []
        # Taken out of what was issued, so that the same actions are taken once more when the ranks leave after all.
        self._issued -= issued
        self._index = next(index for index, step in enumerate(self._steps) if step.phase is Phase.DRAIN)
        self._step_progress = 0.0
        self._enter(Phase.DRAIN, now)
        return [Action(ActionKind.RESTORE, rank) for rank in self.plan.leaving]

    def _find_failure(self, observed: ObservedState) -> str | None:
        """Return what went wrong with a new rank; behind the point of no return its death is one like any other."""
        for rank in () if self.is_committed else self.plan.joining:
            of_rank = observed.of(rank)
            if of_rank.placement is PlacementState.REFUSED:
                return f"no place for rank {rank}: {of_rank.reason}"
            if of_rank.engine is ReplicaState.DEAD:
                return f"the engine of new rank {rank} ended: {of_rank.reason}"
        return None

    def _kill_overdue(self, step: Step, observed: ObservedState, now: float) -> list[Action]:
        """Kill the engines that were dismissed and have not ended in time."""
        if step.phase is not Phase.STOP or now - self._phase_began_at < self._deadlines.stop_s:
            return []
        return [Action(ActionKind.KILL, rank) for rank in step.ranks if not observed.of(rank).is_over]

    def _check_limit(self, step: Step, observed: ObservedState, now: float) -> list[Action]:
        if step.limit_s is None or now - self._phase_began_at < step.limit_s:
            return []
        if step.continues_at_limit:
            return self._enter_next_step(now)
        option = f" ({step.option})" if step.option else ""
        ranks = f": it waits for {name_ranks(self.blocking_ranks)}" if self.blocking_ranks else ""
        return self._fail_step(f"phase {step.phase} is not over after {step.limit_s:g} s{option}{ranks}", observed, now)

    def _enter_next_step(self, now: float) -> list[Action]:
        self._index += 1
        self._step_progress = 0.0
        phase = self._steps[self._index].phase if self._index < len(self._steps) else Phase.DONE
        self._enter(phase, now)
        if self.is_committed or phase not in (*_POINT_OF_NO_RETURN, Phase.DONE):
            return []
        # New ranks are like any other from here on: they stay whatever happens, and are replaced when they end.
        self.is_committed = True
        return [Action(ActionKind.ADMIT, rank) for rank in self.plan.joining]

    # --- rollback ---------------------------------------------------------------------------------------------------

    def _fail_step(self, reason: str, observed: ObservedState, now: float) -> list[Action]:
        return self._advance_rollback(self._begin_rollback(Phase.FAILED, reason), observed, now)

    def _begin_rollback(self, end: Phase, error: str | None) -> Rollback:
        if self._rollback is None:
            self._end_of_rollback, self.error = end, error
            self._rollback = Rollback(self.plan, self._deadlines)
        return self._rollback

    def _advance_rollback(self, rollback: Rollback, observed: ObservedState, now: float) -> list[Action]:
        if self.phase is not Phase.ROLL_BACK:
            self._enter(Phase.ROLL_BACK, now)
        actions = self._once(rollback.advance(observed, now))
        self.blocking_ranks = rollback.missing(observed)
        if not self.blocking_ranks:
            self._enter(self._end_of_rollback, now)
        return actions

    # --- both -------------------------------------------------------------------------------------------------------

    def _once(self, actions: Sequence[Action]) -> list[Action]:
        new = [action for action in actions if action not in self._issued]
        self._issued.update(new)
        return new

    def _enter(self, phase: Phase, now: float) -> None:
        since_s = now - self._started_at
        if self.history:
            self.history[-1].duration_s = since_s - self.history[-1].since_s
        self.history.append(PhaseRecord(phase, since_s))
        self._phase_began_at = now
        self.blocking_ranks = ()
        if phase in ENDS:
            self.history[-1].duration_s = 0.0


def _progress_of(step: Step, observed: ObservedState, elapsed_s: float) -> float:
    """Estimate how much of a step is done, 0..1: from its ranks, or from the time for one that ends at its limit."""
    if step.phase is Phase.LOAD:
        return sum(observed.of(rank).progress for rank in step.ranks) / len(step.ranks)
    if step.continues_at_limit and step.limit_s:
        return min(1.0, elapsed_s / step.limit_s)
    done = sum(step.is_done(observed.of(rank)) for rank in step.ranks)
    return done / len(step.ranks) if step.ranks else 0.0
