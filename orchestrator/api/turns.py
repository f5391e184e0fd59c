"""Which API process takes the next connection: plain data in, a number out.

All processes wait on one listening socket, so a connection never waits for a process that is dead, stopped or busy. But
whoever wakes first would take most of them, and with them the requests. So each looks at what all show on the board and
leaves a connection to the sibling whose turn it is, for a moment only: correctness never depends on the others.
"""

from collections.abc import Sequence

from metrics.board import BoardRow

GRACE_S = 0.001
"""A connection that is another process's turn is left to it for this long."""

MAX_AT_ONCE = 64
_MAX_OUT_OF_TURN = 8


def num_to_accept(me: BoardRow, siblings: Sequence[BoardRow], now: float, *, waited: bool) -> int:
    """Return how many connections to take at most; 0: leave them for ``GRACE_S``.

    The turn is that of the process with the fewest connections, among equals of the one that took none for longest.
    waited: they have been left already and are still there: the one whose turn it is has no time, or there are many.
    """
    others = [row for row in siblings if row.is_awake(now)]
    if not others:
        return MAX_AT_ONCE
    if waited:
        return _MAX_OUT_OF_TURN
    return 1 if _standing(me) <= min(map(_standing, others)) else 0


def _standing(row: BoardRow) -> tuple[float, float, int]:
    return row.num_connections, row.accepted_at, row.index
