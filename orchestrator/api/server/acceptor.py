"""The acceptor: takes connections from the listening socket that all API processes share, in turn.

All processes wait on one socket, so a connection never waits for a process that is dead, stopped or busy. But the
process that wakes first would take most of them, and with them the requests. So each looks at what all show on the
shared status and leaves a connection to the sibling whose turn it is, for a moment only: correctness never depends on
the others.
"""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence

from metrics.shared_status import StatusRow

logger = logging.getLogger(__name__)

ROUND_S = 0.001
"""How long a connection that is another process's turn is left to it before the next look."""

MAX_AT_ONCE = 64
_MANY = 4
_MAX_ROUNDS = 10

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_ROOM_PAUSE_S = 1.0


def num_to_accept(me: StatusRow, siblings: Sequence[StatusRow], now: float, num_rounds: int) -> int:
    """Return how many connections to take at most; 0: leave them for one more round; pure.

    The turn is that of the process with the fewest connections, among equals of the one that took none for longest. It
    takes as many as it is behind by, and a few when they are many, which is when some are left after a round. The
    others wait the longer the more they are ahead. num_rounds: for how many rounds connections have been left already.
    """
    # A sibling that is dead, stopped or busy shows no beat; what is left to it would wait for nothing.
    others = [row for row in siblings if row.is_awake(now)]
    if not others:
        return MAX_AT_ONCE
    ahead = int(me.num_connections - min(row.num_connections for row in others))
    if _row_state(me) <= min(map(_row_state, others)):
        return max(1, min(-ahead, MAX_AT_ONCE), _MANY if num_rounds else 0)
    # The process whose turn it is has not come: one is taken all the same, so that nobody waits for a turn for ever.
    return 1 if num_rounds > min(ahead, _MAX_ROUNDS) else 0


def _row_state(row: StatusRow) -> tuple[float, float, int]:
    return row.num_connections, row.accepted_at, row.index


class Acceptor:
    """One reader on the running loop. The event loop's own server is not used: it takes all connections at once.

    make_protocol: gets what to call once its connection is lost. row: where this process shows its connections;
    siblings: where the others do.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Callable[[], None]], asyncio.Protocol],
        row: StatusRow,
        siblings: Sequence[StatusRow],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._row = row
        self._siblings = siblings
        self._opening: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly
        self._pause: asyncio.TimerHandle | None = None  # while set, the socket is not read
        self._is_open = False

    def start(self) -> None:
        """Take connections from now on; earlier ones wait in the socket's queue."""
        self._listener.setblocking(False)
        self._is_open = True
        self._loop.add_reader(self._listener, self._on_readable)

    def close(self) -> None:
        """Take no more and close this process's copy of the socket; idempotent."""
        if self._is_open:
            self._is_open = False
            self._stop_reading()
        self._listener.close()

    async def aclose(self) -> None:
        """Close, and see connections through that are being opened."""
        self.close()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _on_readable(self, num_rounds: int = 0) -> None:
        allowed = num_to_accept(self._row, self._siblings, time.monotonic(), num_rounds)
        if not allowed:
            self._leave_for(ROUND_S, num_rounds + 1)
        while allowed and self._accept_one():
            allowed -= 1

    def _accept_one(self) -> bool:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # most often: another process was faster
            if error.errno in _NO_ROOM:
                # The socket stays readable; without a pause the loop would do nothing but fail to accept.
                logger.error("cannot take a connection: %s", error.strerror)  # noqa: TRY400 - it says all there is
                self._leave_for(_NO_ROOM_PAUSE_S)
            return False
        self._row.num_connections += 1
        self._row.accepted_at = time.monotonic()
        task = self._loop.create_task(self._open(connection), name="api-open-connection")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return True

    async def _open(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(lambda: self._make_protocol(self._on_lost), connection)
        except OSError as error:  # the caller has hung up already
            logger.debug("a connection was lost while it was opened: %s", error)
            self._give_up(connection)
        except Exception:  # nothing awaits this task: what it raised would be lost
            logger.exception("a connection could not be opened")
            self._give_up(connection)

    def _give_up(self, connection: socket.socket) -> None:
        connection.close()
        self._on_lost()

    def _on_lost(self) -> None:
        self._row.num_connections -= 1

    def _leave_for(self, pause_s: float, num_rounds: int = 0) -> None:
        self._stop_reading()
        self._pause = self._loop.call_later(pause_s, self._look_again, num_rounds)

    def _look_again(self, num_rounds: int) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._on_readable)
        self._on_readable(num_rounds)

    def _stop_reading(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        else:
            self._loop.remove_reader(self._listener)
