"""What the API processes of a deployment show each other of this moment: one row of numbers each, in shared memory."""

from typing import Any

from metrics.shared_counters import Numbers

BEAT_S = 0.25
"""Each process writes its row at least this often."""

NUM_ROW_VALUES = 10

_STOPPED_S = 4 * BEAT_S


class _Field:
    """One number of a row as an attribute."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, row: "StatusRow", _owner: Any = None) -> float:
        return row.counters[self._index]

    def __set__(self, row: "StatusRow", value: float) -> None:
        row.counters[self._index] = value


class StatusRow:
    """One API process as it was a moment ago. Times are of the monotonic clock, which all processes share.

    pid: 0 when there is no process. beat_at: when its own timer last woke it. num_connections, accepted_at: its open
    connections, and when it took the newest. num_open: requests inside. lag_s: worst recent delay of its event loop.
    snapshot_at: when its last load snapshot came, 0 before the first. num_ready: ranks it can send requests to.
    num_waiting_to_move: its sequences that lost their rank and have no other yet.
    """

    pid = _Field(0)
    incarnation = _Field(1)
    beat_at = _Field(2)
    num_connections = _Field(3)
    accepted_at = _Field(4)
    num_open = _Field(5)
    lag_s = _Field(6)
    snapshot_at = _Field(7)
    num_ready = _Field(8)
    num_waiting_to_migrate = _Field(9)

    def __init__(self, index: int, counters: "Numbers | None" = None) -> None:
        """Look at a row. cells: its numbers; default: a row that nobody else sees."""
        self.index = index
        self.counters = [0.0] * NUM_ROW_VALUES if counters is None else counters

    @property
    def is_there(self) -> bool:
        """Tell whether the replica has a process, stopped or not."""
        return self.pid > 0

    def is_awake(self, now: float) -> bool:
        """Tell whether its event loop turns, as far as can be seen."""
        return self.is_there and now - self.beat_at < _STOPPED_S

    def lag_seen_s(self, now: float) -> float:
        """Return the worst recent delay of its event loop, one that still lasts included."""
        return max(self.lag_s, now - self.beat_at - BEAT_S)

    def snapshot_age_s(self, now: float) -> float | None:
        """Return seconds since its last load snapshot, None before the first."""
        return now - self.snapshot_at if self.snapshot_at else None

    def clear(self) -> None:
        """Take the process off the shared status: for whoever saw its end, as it cannot any more."""
        for index in range(NUM_ROW_VALUES):
            self.counters[index] = 0.0
