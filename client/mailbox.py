"""A first-in first-out queue between callbacks and tasks of one event loop, which can be closed with an error."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from engine.wire.errors import EngineDeadError

T = TypeVar("T")


class Mailbox(Generic[T]):
    """``put`` never waits; ``get`` waits for an item, or raises once the box is closed and empty.

    Unlike with ``asyncio.Queue`` the error is not an item: every later ``get`` raises it again, so a second reader
    does not wait for ever. The box may be made before any loop runs. Whoever puts watches ``len`` to stay bounded.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()
        self._error: EngineDeadError | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def error(self) -> EngineDeadError | None:
        """Return why the box was closed, or None while it is open."""
        return self._error

    def put(self, item: T) -> None:
        """Append an item."""
        self._items.append(item)
        if not self._filled.is_set():
            self._filled.set()

    def close(self, error: EngineDeadError) -> None:
        """Let every ``get`` raise once the items are gone; the first error stays."""
        if self._error is None:
            self._error = error
            self._filled.set()

    async def get(self) -> T:
        """Wait for the next item.

        Raises:
            EngineDeadError: the box is closed and empty.
        """
        while not self._items:
            if self._error is not None:
                raise self._error.with_traceback(None)
            await self.wait()
        return self._items.popleft()

    async def wait(self) -> None:
        """Return when there is an item, or at once when the box is closed."""
        if not self._items and self._error is None:
            self._filled.clear()
            await self._filled.wait()

    def drain(self) -> Iterator[T]:
        """Yield the items there are, taking each out just before it is handed over."""
        while self._items:
            yield self._items.popleft()
