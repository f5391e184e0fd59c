"""The counters of each rank, added up over the incarnations of its engine: figures that never go backwards. Pure."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from engine.wire.messages import EngineReport

RANKS, EXPERTS = "engine_totals/", "expert_totals/"
"""Before the rank: names of the records of what its engines counted, and of how often they chose each expert."""

MAX_EXPERTS = 4096
"""No model has more; a report of more comes from no engine, and must not fill the memory."""


class Totals(NamedTuple):
    """The counters of a report; each engine's begin at 0, those of a rank only grow."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_empty_steps: int = 0
    collective_s: float = 0.0

    @classmethod
    def of(cls, report: EngineReport) -> "Totals":
        """Return the counters of one engine: those of its load, and what a lockstep rank adds."""
        member = report.member
        of_member = (0, 0.0) if member is None else (member.num_empty_steps, member.collective_s)
        return cls._make([*(getattr(report.load, name) for name in cls._fields[:-2]), *of_member])

    @classmethod
    def recorded(cls, counted: Sequence[float]) -> "Totals":
        """Return the totals of a record, see ``totals_in``: in it all are floats."""
        *numbers, collective_s = counted
        return cls._make([*map(int, numbers), collective_s])


NOTHING_COUNTED = Totals()


Record: TypeAlias = "list[float] | memoryview[float]"
"""Numbers: incarnation of a rank's newest engine; the rank's totals; its totals as they were when that engine came."""

_INCARNATION, _TOTALS = 0, 1


def num_values(num_counters: int) -> int:
    """Return how many numbers a record of so many counters has."""
    return 1 + 2 * num_counters


def totals_in(record: Record) -> list[float]:
    """Return the totals in a record."""
    return list(record[_TOTALS : _TOTALS + _num_counters(record)])


class RankTotals:
    """Adds up the counters of a rank's incarnations as their reports come.

    A replaced replica's engine begins at 0 again; what its predecessors last reported is kept below it, so that a
    rank's counters go on where they stopped. What an engine did after its last report is lost with it: 0.2 s at most.
    One record stays for every rank ever heard of, because a rank that comes back must not begin again.

    A record is numbers alone, zeros at first, so that it may lie in memory that outlives this process and that others
    read meanwhile. Its totals only grow, one by one; a process that dies in between leaves a record from which its
    successor counts right.
    """

    def __init__(self, make_record: Callable[[str, int], Record] = lambda _, num_values: [0.0] * num_values) -> None:
        """Begin with what the records hold.

        make_record: name, how many numbers -> a record, of zeros or of what a predecessor left; called once per name.
        """
        self._make_record = make_record
        self._records: dict[str, Record] = {}

    def on_reports(self, reports: Iterable[EngineReport]) -> None:
        """Take the newest reports of some engines; one of an earlier incarnation than the last seen is ignored."""
        for report in reports:
            self._count(RANKS, report, Totals.of(report))
            if report.member is not None and 0 < len(report.member.expert_loads) <= MAX_EXPERTS:
                self._count(EXPERTS, report, report.member.expert_loads)

    def of_rank(self, rank: int) -> Totals:
        """Return the sums over all incarnations of a rank; zeros when it has never reported."""
        record = self._records.get(f"{RANKS}{rank}")
        return NOTHING_COUNTED if record is None else Totals.recorded(totals_in(record))

    def _count(self, kind: str, report: EngineReport, counted: Sequence[float]) -> None:
        name = f"{kind}{report.engine_id.rank}"
        if name not in self._records:
            self._records[name] = self._make_record(name, num_values(len(counted)))
        _advance(self._records[name], report.engine_id.incarnation, counted)


def _advance(record: Record, incarnation: int, counted: Sequence[float]) -> None:
    if incarnation < record[_INCARNATION]:
        return
    bases = _TOTALS + _num_counters(record)
    if incarnation > record[_INCARNATION]:
        for index in range(_TOTALS, bases):
            record[index + bases - _TOTALS] = record[index]
        record[_INCARNATION] = incarnation  # last: until it is written, all this may be done once more
    for index, count in enumerate(counted[: bases - _TOTALS]):
        # The larger of both: a restarted coordinator may pass on a report that is older than the last one seen.
        record[_TOTALS + index] = max(record[_TOTALS + index], record[bases + index] + count)


def _num_counters(record: Record) -> int:
    return (len(record) - 1) // 2
