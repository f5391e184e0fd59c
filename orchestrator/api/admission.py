"""Who gets in: the door counts what is inside and is shut when the house is full or closing."""

import asyncio
from collections.abc import Sequence

from engine.wire.errors import OverloadedError
from metrics.shared_status import StatusRow

_RETRY_WHEN_FULL_S = 1.0
_RETRY_WHEN_DRAINING_S = 5.0


class Admission:
    """Counts open generation requests of this process, on one event loop, and knows how many the siblings have.

    Two processes may let the last one in at the same moment: the limit is exceeded by less than their number.
    """

    def __init__(self, max_pending: int, row: StatusRow, siblings: Sequence[StatusRow] = ()) -> None:
        """Open the door. max_pending: requests inside all processes at most. row: where this one shows its number."""
        self._max_pending = max_pending
        self._row = row
        self._siblings = siblings
        self._num_open = 0
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        """Return how many requests are inside this process."""
        return self._num_open

    @property
    def draining(self) -> bool:
        """Tell whether the door is shut for good."""
        return self._draining

    def ensure_room(self) -> None:
        """Tell whoever would not be let in now.

        Raises:
            OverloadedError: full, or shut for good; says when to come back.
        """
        if self._draining:
            raise OverloadedError("the server is shutting down", _RETRY_WHEN_DRAINING_S)
        num_open = self._num_open + sum(int(row.num_open) for row in self._siblings)
        if num_open >= self._max_pending:
            raise OverloadedError(
                f"the server already has {num_open} requests, its limit (--max-pending-requests)", _RETRY_WHEN_FULL_S
            )

    def enter(self) -> None:
        """Let one request in; whoever entered calls ``leave`` in the end. Raises as ``ensure_room`` does."""
        self.ensure_room()
        self._num_open += 1
        self._row.num_open = self._num_open
        self._empty.clear()

    def leave(self) -> None:
        """Let one request out that had entered."""
        self._num_open -= 1
        self._row.num_open = self._num_open
        if self._num_open == 0:
            self._empty.set()

    def drain(self) -> None:
        """Shut the door; those inside may stay."""
        self._draining = True

    async def wait_empty(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()
