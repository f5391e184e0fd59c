"""An event loop in a thread of its own: synchronous callers need none, and may have one running (a notebook)."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers in other threads until it is told to stop. A daemon: it keeps no interpreter alive.

    _farewell: what the loop does last; written before ``_stop`` is set, read after it.
    """

    def __init__(self, name: str) -> None:
        self._started = threading.Event()
        self._farewell: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait for its result; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, farewell: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Let the loop end after ``farewell``; idempotent, from any thread, does not wait."""
        self._farewell = self._farewell or farewell
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._started.set()
        await self._stop.wait()
        if self._farewell is not None:
            await self._farewell()
