"""Metrics of all API processes of a deployment: each writes its own counters and status, everybody reads all."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.wire.states import EngineState
from lb.views.engine_view import EngineView
from lb.views.totals import EXPERTS, NOTHING_COUNTED, RANKS, Totals, totals_in
from metrics.shared_counters import Numbers, PrivateCounters, Reading, SharedCounters, add_up, read_counters
from metrics.shared_status import StatsMemory, StatusRow
from metrics.stats import ServingStats

_IN_FLIGHT = "in_flight/"
_STARTS = "starts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServerView:
    """One API process at the moment of a reading.

    pid: 0 while there is no process of that index; then all that is of a moment is 0 or None too. num_starts: processes
    that were started with that index. num_ready: ranks it can send requests to. lag_s: worst recent delay of its event
    loop. snapshot_age_s: None before the first load snapshot. num_waiting_to_migrate: its sequences that lost their
    rank.
    """

    index: int
    incarnation: int
    pid: int
    num_starts: int
    num_connections: int
    num_open: int
    num_ready: int
    lag_s: float
    snapshot_age_s: float | None
    num_waiting_to_migrate: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentReading:
    """The counts of all API processes, ended ones included, and the status of those that live.

    stats: the sums. totals, in_flight: by rank: what its engines have counted, and the unfinished sequences that live
    processes have on it. servers: by process index. expert_tokens: how often each expert was chosen, by all ranks that
    ever were; empty for independent ones.
    """

    stats: ServingStats
    totals: Mapping[int, Totals]
    in_flight: Mapping[int, int]
    servers: Sequence[ApiServerView]
    expert_tokens: Sequence[int] = ()

    def totals_of(self, rank: int) -> Totals:
        """Return what the engines of a rank have counted, over all incarnations."""
        return self.totals.get(rank, NOTHING_COUNTED)


class DeploymentStats:
    """The counters and the status row of one API process, and the reading over those of all.

    stats: fed by this process. row: its own status. siblings: the rows of the others.
    """

    def __init__(self, index: int = 0, incarnation: int = 1, memory: StatsMemory | None = None) -> None:
        """Become the process ``index``. memory: None: it is the only one, and what it counts ends with it."""
        self._fds = [] if memory is None else memory.counts
        self._counters = PrivateCounters() if memory is None else SharedCounters(memory.counts[index])
        self._rows = [StatusRow(index)] if memory is None else memory.rows()
        self.stats = ServingStats(self._counters)
        self.row = next(row for row in self._rows if row.index == index)
        self.siblings = [row for row in self._rows if row.index != index]
        self._in_flight: dict[int, Numbers] = {}
        self._enter(incarnation)

    def totals_record(self, name: str, num_values: int) -> Numbers:
        """Return where ``RankTotals`` keeps a record."""
        return self._counters.run(name, num_values)

    def on_heartbeat(
        self, lag_s: float, snapshot_age_s: float | None, views: Sequence[EngineView], num_waiting_to_migrate: int = 0
    ) -> None:
        """Write the status row; called every ``HEARTBEAT_S`` and before a reading of one's own.

        lag_s: worst recent delay of the event loop. snapshot_age_s: seconds since the last load snapshot, None before
        the first. views: what this process knows of each rank. num_waiting_to_migrate: sequences without a rank.
        """
        now = time.monotonic()
        self.row.lag_s = lag_s
        self.row.snapshot_at = 0.0 if snapshot_age_s is None else now - snapshot_age_s
        self.row.num_ready = sum(view.state is EngineState.READY for view in views)
        self.row.num_waiting_to_migrate = num_waiting_to_migrate
        self.row.heartbeat_at = now
        in_flight = {view.engine_id.rank: view.num_in_flight for view in views}
        for rank in in_flight.keys() - self._in_flight.keys():
            self._in_flight[rank] = self._counters.run(f"{_IN_FLIGHT}{rank}", 1)
        for rank, number in self._in_flight.items():  # also of ranks that are gone: theirs become 0
            number[0] = in_flight.get(rank, 0)

    def read(self) -> DeploymentReading:
        """Return the counts and the status of all processes as they are now."""
        readings = [read_counters(fd) for fd in self._fds] or [_read_private(self._counters)]
        # What an ended process had in flight is no longer; its numbers stay in memory until a successor begins.
        live = [reading for row, reading in zip(self._rows, readings, strict=True) if row.is_there]
        now = time.monotonic()
        return DeploymentReading(
            stats=ServingStats(PrivateCounters(add_up(readings))),
            totals={rank: Totals.recorded(counts) for rank, counts in _largest_totals(readings, RANKS).items()},
            in_flight={rank: int(numbers[0]) for rank, numbers in _by_rank(add_up(live), _IN_FLIGHT)},
            servers=[_view(row, reading, now) for row, reading in zip(self._rows, readings, strict=True)],
            expert_tokens=_sums(_largest_totals(readings, EXPERTS).values()),
        )

    def _enter(self, incarnation: int) -> None:
        """Take over from a predecessor of this index: its counts go on, its status does not."""
        self.row.clear()
        for name in self._counters.names():
            if name.startswith(_IN_FLIGHT):
                self._counters.run(name, 1)[0] = 0.0
        self._counters.run(_STARTS, 1)[0] += 1
        self.row.incarnation = incarnation
        self.row.heartbeat_at = time.monotonic()
        self.row.pid = os.getpid()  # last: with it the row counts as a live process


def _read_private(counters: PrivateCounters | SharedCounters) -> Reading:
    return {name: list(counters.run(name, 0)) for name in counters.names()}


def _largest_totals(readings: Sequence[Reading], kind: str) -> dict[int, list[float]]:
    """Return rank -> counts of its engines. Every process keeps the whole count, so the furthest one is the count."""
    largest: dict[int, list[float]] = {}
    for reading in readings:
        for rank, record in _by_rank(reading, kind):
            counts = totals_in(record)
            largest[rank] = list(map(max, largest.get(rank, counts), counts))
    return largest


def _sums(counts: Iterable[Sequence[float]]) -> list[int]:
    return [int(sum(each)) for each in zip(*counts, strict=False)]


def _by_rank(reading: Reading, prefix: str) -> Iterator[tuple[int, list[float]]]:
    for name, numbers in reading.items():
        if name.startswith(prefix):
            yield int(name.removeprefix(prefix)), numbers


def _view(row: StatusRow, reading: Reading, now: float) -> ApiServerView:
    return ApiServerView(
        index=row.index,
        incarnation=int(row.incarnation),
        pid=int(row.pid),
        num_starts=int(reading[_STARTS][0]) if _STARTS in reading else 0,
        num_connections=int(row.num_connections),
        num_open=int(row.num_open),
        num_ready=int(row.num_ready),
        lag_s=row.lag_seen_s(now) if row.is_there else 0.0,
        snapshot_age_s=row.snapshot_age_s(now),
        num_waiting_to_migrate=int(row.num_waiting_to_migrate),
    )
