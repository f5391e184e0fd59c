"""The way back of a scale operation: new ranks go, each by itself; those that were to leave stay. Pure."""

from orchestrator.scaling.facts import EngineStage, Facts, Order, Place, RankFacts, Verb
from orchestrator.scaling.plan import ScalePlan
from orchestrator.scaling.steps import ScaleDeadlines


class Retreat:
    """Undoes what an operation did before its point of no return; nothing in here can fail.

    A new rank may already serve: picks use it as soon as it is ready. So what it has moves before it goes. One that is
    silent moves nothing: it is killed, and what it has goes on elsewhere as after any death.
    """

    def __init__(self, plan: ScalePlan, deadlines: ScaleDeadlines) -> None:
        self._plan = plan
        self._deadlines = deadlines
        self._moving_since: dict[int, float] = {}
        self._stopping_since: dict[int, float] = {}

    def advance(self, facts: Facts, now: float) -> list[Order]:
        """Return what is to be done now; orders are repeated until they have had their effect."""
        orders = [Order(Verb.RESTORE, rank) for rank in self._plan.leaving]
        for rank in self._plan.joining:
            orders += [Order(verb, rank) for verb in self._undo(rank, facts.of(rank), now)]
        return orders

    def missing(self, facts: Facts) -> tuple[int, ...]:
        """Return the new ranks of which something is left."""
        return tuple(rank for rank in self._plan.joining if not _is_gone(facts.of(rank)))

    def _undo(self, rank: int, known: RankFacts, now: float) -> list[Verb]:
        if _is_gone(known):
            return []
        if known.is_over:
            return [Verb.RELEASE]
        if known.engine is EngineStage.STARTING or known.is_silent:
            return [Verb.KILL]
        return self._empty_and_stop(rank, known, now)

    def _empty_and_stop(self, rank: int, known: RankFacts, now: float) -> list[Verb]:
        has_time = now - self._moving_since.setdefault(rank, now) < self._deadlines.move_s
        if has_time and (known.is_member or not known.is_empty):
            return [Verb.CORDON, Verb.MOVE, Verb.LEAVE]
        is_late = now - self._stopping_since.setdefault(rank, now) >= self._deadlines.stop_s
        return [Verb.STOP, Verb.KILL] if is_late else [Verb.STOP]


def _is_gone(known: RankFacts) -> bool:
    return known.place is Place.NONE and known.is_over
