"""One scale operation as a state machine: facts and ``now`` in, orders out. No clock, no socket, no process."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.wire.ids import name_ranks
from engine.wire.states import ReplicaState
from orchestrator.scaling.errors import RefusalKind, ScaleRefusedError
from orchestrator.scaling.observed_state import Action, ActionKind, ObservedState, PlacementState
from orchestrator.scaling.plan import ScalePlan, ScaleRequest
from orchestrator.scaling.rollback import Rollback
from orchestrator.scaling.steps import ENDS, Phase, ScaleDeadlines, Step, steps_of

_POINT_OF_NO_RETURN = (Phase.SWITCH, Phase.STOP)


@dataclass(slots=True)
class PhaseRecord:
    """One phase of the past or of now. since_s: from the start of the operation. duration_s: None while it lasts."""

    phase: Phase
    since_s: float
    duration_s: float | None = None


class ScaleOperation:
    """Takes a deployment from one set of ranks to another, or back to where it was.

    New ranks come first, then those that leave go; so at every moment the smaller of the two sizes serves. Until the
    point of no return any failure, and ``cancel``, undoes what was done: new ranks hand back what they got and go, and
    ranks that were to leave take requests again. Behind it nothing can fail any more, only last.

    created_at: Unix time, for people. phase, error, blocking_ranks: of now; the last are those that the phase waits
    for. history: phases in their order.
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
        """Begin at ``now`` (monotonic seconds, as in ``advance``). key: the caller's name for it, if it gave one."""
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
        self._began_at = now
        self._share = 0.0
        self._issued: set[Action] = set()
        self._rollback: Rollback | None = None
        self._end = Phase.FAILED
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
        return (done + current * self._share) / total if total else 1.0

    def elapsed_s(self, now: float) -> float:
        """Return how long it has taken, or took."""
        last = self.history[-1]
        return last.since_s if self.is_over else now - self._started_at

    def eta_s(self, now: float) -> float | None:
        """Guess how long it will still take, from how long it took so far; None while that says nothing."""
        if self.is_over:
            return 0.0
        if self._rollback is not None or self.progress <= 0.0:
            return None
        return self.elapsed_s(now) * (1.0 - self.progress) / self.progress

    def cancel(self) -> None:
        """Ask for the way back; ``advance`` takes it. Asking again changes nothing.

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
        """Turn back for a reason that is not in the facts; no effect behind the point of no return."""
        if not self.is_over and not self.is_committed:
            self._begin_rollback(Phase.FAILED, reason)

    def advance(self, observed: ObservedState, now: float) -> list[Action]:
        """Look at the deployment and return what is to be done now. Each order is given once."""
        actions: list[Action] = []
        while not self.is_over:
            before = self.phase
            actions += self._go_on(observed, now) if self._rollback is None else self._go_back(observed, now)
            if self.phase is before:
                break
        return actions

    # --- forward ----------------------------------------------------------------------------------------------------

    def _go_on(self, observed: ObservedState, now: float) -> list[Action]:
        step = self._steps[self._index]
        failure = self._find_failure(observed)
        if failure is not None:
            self._begin_rollback(Phase.FAILED, failure)
            return self._go_back(observed, now)
        if step.waits_for_healing and observed.healing:
            actions = [] if observed.is_served else self._stay(now)
            self.blocking_ranks, self._began_at = observed.healing, now
            return actions
        actions = self._once(step.actions + self._insist(step, observed, now))
        self.blocking_ranks = tuple(rank for rank in step.who if not step.is_done(observed.of(rank)))
        self._share = max(self._share, _share_done(step, observed, now - self._began_at))
        if not self.blocking_ranks and step.is_group_done(observed):
            return actions + self._next(now)
        return actions + self._judge_time(step, observed, now)

    def _stay(self, now: float) -> list[Action]:
        """Let the leaving ranks take requests again while nobody else serves; later they begin to leave anew."""
        told = {
            action
            for action in self._issued
            if action.kind in (ActionKind.CORDON, ActionKind.MIGRATE, ActionKind.LEAVE)
        }
        if not told:
            return []
        self._issued -= told
        self._index = next(index for index, step in enumerate(self._steps) if step.phase is Phase.DRAIN)
        self._share = 0.0
        self._enter(Phase.DRAIN, now)
        return [Action(ActionKind.RESTORE, rank) for rank in self.plan.leaving]

    def _find_failure(self, observed: ObservedState) -> str | None:
        """Say what went wrong with a new rank; behind the point of no return it is a death like any other."""
        for rank in () if self.is_committed else self.plan.joining:
            known = observed.of(rank)
            if known.placement is PlacementState.REFUSED:
                return f"no place for rank {rank}: {known.reason}"
            if known.engine is ReplicaState.DEAD:
                return f"the engine of new rank {rank} ended: {known.reason}"
        return None

    def _insist(self, step: Step, observed: ObservedState, now: float) -> list[Action]:
        """End what was dismissed and does not go."""
        if step.phase is not Phase.STOP or now - self._began_at < self._deadlines.stop_s:
            return []
        return [Action(ActionKind.KILL, rank) for rank in step.who if not observed.of(rank).is_over]

    def _judge_time(self, step: Step, observed: ObservedState, now: float) -> list[Action]:
        if step.limit_s is None or now - self._began_at < step.limit_s:
            return []
        if step.goes_on_late:
            return self._next(now)
        option = f" ({step.option})" if step.option else ""
        who = f": it waits for {name_ranks(self.blocking_ranks)}" if self.blocking_ranks else ""
        self._begin_rollback(Phase.FAILED, f"phase {step.phase} is not over after {step.limit_s:g} s{option}{who}")
        return self._go_back(observed, now)

    def _next(self, now: float) -> list[Action]:
        self._index += 1
        self._share = 0.0
        phase = self._steps[self._index].phase if self._index < len(self._steps) else Phase.DONE
        self._enter(phase, now)
        if self.is_committed or phase not in (*_POINT_OF_NO_RETURN, Phase.DONE):
            return []
        self.is_committed = True
        return [Action(ActionKind.ADMIT, rank) for rank in self.plan.joining]

    # --- back -------------------------------------------------------------------------------------------------------

    def _begin_rollback(self, end: Phase, error: str | None) -> None:
        if self._rollback is None:
            self._end, self.error = end, error
            self._rollback = Rollback(self.plan, self._deadlines)

    def _go_back(self, observed: ObservedState, now: float) -> list[Action]:
        assert self._rollback is not None
        if self.phase is not Phase.ROLL_BACK:
            self._enter(Phase.ROLL_BACK, now)
        actions = self._once(self._rollback.advance(observed, now))
        self.blocking_ranks = self._rollback.missing(observed)
        if not self.blocking_ranks:
            self._enter(self._end, now)
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
        self._began_at = now
        self.blocking_ranks = ()
        if phase in ENDS:
            self.history[-1].duration_s = 0.0


def _share_done(step: Step, observed: ObservedState, elapsed_s: float) -> float:
    """Guess how much of a step is done: by what its ranks say, or, for what ends at a deadline, by time."""
    if step.phase is Phase.LOAD:
        return sum(observed.of(rank).progress for rank in step.who) / len(step.who)
    if step.goes_on_late and step.limit_s:
        return min(1.0, elapsed_s / step.limit_s)
    done = sum(step.is_done(observed.of(rank)) for rank in step.who)
    return done / len(step.who) if step.who else 0.0
