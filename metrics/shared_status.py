"""The shared status of the API processes: one row of numbers per process, in memory that all of them map.

``StatsMemory`` is that memory together with the counters' (``shared_counters.py``), as the supervisor holds it.
"""

import mmap
import os
from typing import Any

from msgspec import Struct

from metrics.shared_counters import Numbers, make_shared_memory

HEARTBEAT_S = 0.25
"""Each process writes its row at least this often."""

_NUM_ROW_VALUES = 10
_ROW_BYTES = _NUM_ROW_VALUES * 8

_STOPPED_S = 4 * HEARTBEAT_S


class _Field:
    """One number of a row as an attribute."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, row: "StatusRow", _owner: Any = None) -> float:
        return row.numbers[self._index]

    def __set__(self, row: "StatusRow", value: float) -> None:
        row.numbers[self._index] = value


class StatusRow:
    """One API process as it was a moment ago. Times are of the monotonic clock, which all processes share.

    pid: 0 when there is no process. heartbeat_at: when its own timer last woke it. num_connections, accepted_at: its
    open connections, and when it took the newest. num_open: requests inside. lag_s: worst recent delay of its event
    loop. snapshot_at: when its last load snapshot came, 0 before the first. num_ready: ranks it can send requests to.
    num_waiting_to_migrate: its sequences that lost their rank and have no other yet.
    """

    pid = _Field(0)
    incarnation = _Field(1)
    heartbeat_at = _Field(2)
    num_connections = _Field(3)
    accepted_at = _Field(4)
    num_open = _Field(5)
    lag_s = _Field(6)
    snapshot_at = _Field(7)
    num_ready = _Field(8)
    num_waiting_to_migrate = _Field(9)

    def __init__(self, index: int, numbers: "Numbers | None" = None) -> None:
        """Look at a row. numbers: where it lies; default: a row that nobody else sees."""
        self.index = index
        self.numbers = [0.0] * _NUM_ROW_VALUES if numbers is None else numbers

    @property
    def is_there(self) -> bool:
        """Tell whether there is a process, stopped or not."""
        return self.pid > 0

    def is_awake(self, now: float) -> bool:
        """Tell whether its event loop turns, as far as can be seen."""
        return self.is_there and now - self.heartbeat_at < _STOPPED_S

    def lag_seen_s(self, now: float) -> float:
        """Return the worst recent delay of its event loop, one that still lasts included."""
        # The process itself notes a delay when it is over, and a stopped one never does: its heartbeat shows it.
        return max(self.lag_s, now - self.heartbeat_at - HEARTBEAT_S)

    def snapshot_age_s(self, now: float) -> float | None:
        """Return seconds since its last load snapshot, None before the first."""
        return now - self.snapshot_at if self.snapshot_at else None

    def clear(self) -> None:
        """Take the process off the shared status: for whoever saw its end, as it cannot any more."""
        for index in range(_NUM_ROW_VALUES):
            self.numbers[index] = 0.0


class StatsMemory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Descriptors of the shared memory, which children inherit under the same numbers; part of an API process's spec.

    status: a row per process. counts: by process index, what that process and all before it at its index have counted.
    The supervisor holds them all, so nothing that was counted is lost with a process, and nothing is left behind.
    """

    status: int
    counts: list[int]

    @classmethod
    def make(cls, num_processes: int) -> "StatsMemory":
        """Return empty memory for that many processes."""
        status = make_shared_memory()
        os.ftruncate(status, num_processes * _ROW_BYTES)
        return cls(status=status, counts=[make_shared_memory() for _ in range(num_processes)])

    @property
    def fds(self) -> tuple[int, ...]:
        """Return every descriptor."""
        return (self.status, *self.counts)

    def rows(self) -> list[StatusRow]:
        """Return the rows of the shared status, by process index."""
        numbers = memoryview(mmap.mmap(self.status, len(self.counts) * _ROW_BYTES)).cast("d")
        starts = range(0, len(numbers), _NUM_ROW_VALUES)
        return [StatusRow(index, numbers[start : start + _NUM_ROW_VALUES]) for index, start in enumerate(starts)]

    def close(self) -> None:
        """Let go of the memory; it ends with the last process that holds it."""
        for fd in self.fds:
            os.close(fd)
