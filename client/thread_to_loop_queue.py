"""The way back from engines in threads to a client on an event loop."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ThreadToLoopQueue(Generic[T]):
    """Takes items in any thread and gives them to one method on the loop, in order.

    At most ``limit`` items are on their way or unread: then ``put`` waits, so engines stand still while nobody takes
    their outputs. Every item that was received is given back with ``release`` once it has been read.
    The receiver is held weakly: a thread that waits here keeps no client alive.
    """

    def __init__(self, receive: Callable[[T], Any], limit: int) -> None:
        """receive: a bound method."""
        self._receive = weakref.WeakMethod(receive)
        self._room = threading.Semaphore(limit)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop, before anything that is answered is asked for."""
        assert self._loop in (None, loop), "a client lives on one loop"
        self._loop = loop

    def put(self, item: T) -> None:
        """Hand one item over; drops it when nobody is there to receive it."""
        self._room.acquire()
        if self._closed or self._loop is None:
            self._room.release()  # also lets the next one through that waits
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed, and the client's life with it
            self._loop.call_soon_threadsafe(self._deliver, item)

    def release(self) -> None:
        """Give back the room of one item that was read."""
        self._room.release()

    def close(self) -> None:
        """Let everybody through who waits; what they hold is dropped. Idempotent, from any thread."""
        self._closed = True
        self._room.release()

    def _deliver(self, item: T) -> None:
        receive = self._receive()
        if receive is not None and not self._closed:
            receive(item)
