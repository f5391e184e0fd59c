"""What the engines of each rank have counted over all their lives: figures that never go backwards."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

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


Record: TypeAlias = "list[float] | memoryview[float]"
"""Incarnation of a rank's newest engine; the rank's totals; its totals as they were when that engine came."""

_NUM_TOTALS = len(Totals._fields)
_INCARNATION, _TOTALS, _BASES = 0, 1, 1 + _NUM_TOTALS
NUM_RECORD_CELLS = 1 + 2 * _NUM_TOTALS


def totals_in(record: Record) -> Totals:
    """Return the totals that a record tells of."""
    return Totals(*(int(count) for count in record[_TOTALS:_BASES]))


class RankTotals:
    """Adds up the counters of a rank's incarnations as their reports come.

    A refilled seat's engine begins at 0 again; what its predecessors last reported is kept below it, so that a rank's
    counters go on where they stopped. What an engine did after its last report is lost with it: 0.2 s at most. One
    record stays for every rank ever heard of, because a rank that comes back must not begin again.

    A record is numbers alone, zeros at first, so that it may lie in memory that outlives this process and that others
    read meanwhile. Its totals only grow, one by one; a process that dies in between leaves a record from which its
    successor counts right.
    """

    def __init__(self, make_record: Callable[[int], Record] = lambda _: [0.0] * NUM_RECORD_CELLS) -> None:
        """Begin. make_record: rank -> its record, which may hold numbers already; asked for once per rank."""
        self._make_record = make_record
        self._records: dict[int, Record] = {}

    def on_reports(self, reports: Iterable[EngineReport]) -> None:
        """Take the newest reports of some engines; one of an earlier incarnation than the last seen says nothing."""
        for report in reports:
            self._on_report(self._record(report.engine_id.rank), report.engine_id.incarnation, Totals.of(report.load))

    def of_rank(self, rank: int) -> Totals:
        """Return the sums over all incarnations of a rank; zeros when it has never reported."""
        return totals_in(self._records[rank]) if rank in self._records else NOTHING_COUNTED

    def _record(self, rank: int) -> Record:
        if rank not in self._records:
            self._records[rank] = self._make_record(rank)
        return self._records[rank]

    def _on_report(self, record: Record, incarnation: int, counted: Totals) -> None:
        if incarnation < record[_INCARNATION]:
            return
        if incarnation > record[_INCARNATION]:
            for place in range(_NUM_TOTALS):
                record[_BASES + place] = record[_TOTALS + place]
            record[_INCARNATION] = incarnation  # last: until it is written, all this may be done once more
        for place, count in enumerate(counted):
            # The larger of both: a restarted coordinator may pass on a report that is older than the last one seen.
            record[_TOTALS + place] = max(record[_TOTALS + place], record[_BASES + place] + count)
