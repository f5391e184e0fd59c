"""Which API process takes the next connection: plain data in, a number out.

All processes wait on one listening socket, so a connection never waits for a process that is dead, stopped or busy. But
whoever wakes first would take most of them, and with them the requests. So each looks at what all show on the shared
status and leaves a connection to the sibling whose turn it is, for a moment only: correctness never depends on the
others.
"""

from collections.abc import Sequence

from metrics.shared_status import StatusRow

ROUND_S = 0.001
"""How long a connection that is another process's turn is left to it before the next look."""

MAX_AT_ONCE = 64
_MANY = 4
_MAX_ROUNDS = 10


def num_to_accept(me: StatusRow, siblings: Sequence[StatusRow], now: float, num_rounds: int) -> int:
    """Return how many connections to take at most; 0: leave them for one more round.

    The turn is that of the process with the fewest connections, among equals of the one that took none for longest. It
    takes as many as it is behind by, and a few when they are many, which is when some are left after a round. The
    others wait the longer the more they are ahead. num_rounds: for how many rounds connections have been left already.
    """
    others = [row for row in siblings if row.is_awake(now)]
    if not others:
        return MAX_AT_ONCE
    ahead = int(me.num_connections - min(row.num_connections for row in others))
    if _row_state(me) <= min(map(_row_state, others)):
        return max(1, min(-ahead, MAX_AT_ONCE), _MANY if num_rounds else 0)
    return 1 if num_rounds > min(ahead, _MAX_ROUNDS) else 0


def _row_state(row: StatusRow) -> tuple[float, float, int]:
    return row.num_connections, row.accepted_at, row.index
