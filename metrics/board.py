"""What the API processes of a deployment show each other of this moment: one row of numbers each, in shared memory."""

from typing import Any

from metrics.cells import Numbers

BEAT_S = 0.25
"""Each process writes its row at least this often."""

NUM_ROW_CELLS = 10

_STOPPED_S = 4 * BEAT_S


class _Cell:
    """One number of a row as an attribute."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, row: "BoardRow", _owner: Any = None) -> float:
        return row.cells[self._place]

    def __set__(self, row: "BoardRow", value: float) -> None:
        row.cells[self._place] = value


class BoardRow:
    """One API process as it was a moment ago. Times are of the monotonic clock, which all processes share.

    pid: 0 when there is no process. beat_at: when its own timer last woke it. num_connections, accepted_at: its open
    connections, and when it took the newest. num_open: requests inside. lag_s: worst recent delay of its event loop.
    snapshot_at: when its last load snapshot came, 0 before the first. num_ready: ranks it can send requests to.
    num_waiting_to_move: its sequences that lost their rank and have no other yet.
    """

    pid = _Cell(0)
    incarnation = _Cell(1)
    beat_at = _Cell(2)
    num_connections = _Cell(3)
    accepted_at = _Cell(4)
    num_open = _Cell(5)
    lag_s = _Cell(6)
    snapshot_at = _Cell(7)
    num_ready = _Cell(8)
    num_waiting_to_move = _Cell(9)

    def __init__(self, index: int, cells: "Numbers | None" = None) -> None:
        """Look at a row. cells: its numbers; default: a row that nobody else sees."""
        self.index = index
        self.cells = [0.0] * NUM_ROW_CELLS if cells is None else cells

    @property
    def is_there(self) -> bool:
        """Tell whether the seat has a process, stopped or not."""
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
        """Take the process off the board: for whoever saw its end, as it cannot any more."""
        for place in range(NUM_ROW_CELLS):
            self.cells[place] = 0.0
