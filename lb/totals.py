"""What the engines of each rank have counted over all their lives: figures that never go backwards."""

from collections.abc import Iterable
from typing import NamedTuple

from engine.wire.ids import EngineId
from engine.wire.messages import EngineReport, Load


class Totals(NamedTuple):
    """The counters of a ``Load``; each engine's begin at 0, those of a rank only grow."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0

    @classmethod
    def of(cls, load: Load) -> "Totals":
        """Return the counters of one engine's load."""
        return cls(*(getattr(load, name) for name in cls._fields))

    def plus(self, other: "Totals") -> "Totals":
        """Return the sums."""
        return Totals(*(mine + others for mine, others in zip(self, other, strict=True)))


NOTHING_COUNTED = Totals()


class RankTotals:
    """Adds up the counters of a rank's incarnations as their reports come.

    A refilled seat's engine begins at 0 again; what its predecessors last reported is kept below it, so that a rank's
    counters go on where they stopped. What an engine did after its last report is lost with it: 0.2 s at most. One
    entry stays for every rank ever heard of, because a rank that comes back must not begin again.
    """

    def __init__(self) -> None:
        self._newest: dict[int, tuple[EngineId, Totals]] = {}
        self._former: dict[int, Totals] = {}

    def on_reports(self, reports: Iterable[EngineReport]) -> None:
        """Take the newest reports of some engines; one of an earlier incarnation than the last seen says nothing."""
        for report in reports:
            self._on_report(report.engine_id, Totals.of(report.load))

    def of_rank(self, rank: int) -> Totals:
        """Return the sums over all incarnations of a rank; zeros when it has never reported."""
        former = self._former.get(rank, NOTHING_COUNTED)
        known = self._newest.get(rank)
        return former if known is None else former.plus(known[1])

    def _on_report(self, engine_id: EngineId, totals: Totals) -> None:
        known_id, known = self._newest.get(engine_id.rank, (engine_id, NOTHING_COUNTED))
        if engine_id < known_id:
            return
        if engine_id > known_id:
            self._former[engine_id.rank] = self._former.get(engine_id.rank, NOTHING_COUNTED).plus(known)
            known = NOTHING_COUNTED
        # The larger of each: a restarted coordinator may pass on a report that is older than the last one seen.
        self._newest[engine_id.rank] = engine_id, Totals(*map(max, known, totals))
