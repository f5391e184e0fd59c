"""An event loop in a thread of its own: synchronous callers need none, and may have one running (a notebook)."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from engine.wire.errors import EngineDeadError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers in other threads until it is told to stop. A daemon: it keeps no interpreter alive.

    _farewell: what the loop does last; written before ``_stop`` is set, read after it.
    _open: work that was handed over and has not ended, None once the loop has; under ``_lock``, so that no work can be
    handed to a loop that will not look at it any more and be waited for in vain.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._open: dict[Future[Any], Coroutine[Any, Any, Any]] | None = {}
        self._started = threading.Event()
        self._farewell: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait for its result; an interrupt of the caller cancels it.

        Raises:
            EngineDeadError: the loop ends, or has ended.
        """
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise EngineDeadError(f"the thread {self._thread.name!r} has ended") from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run ``work`` on the loop and return at once; the future is cancelled when the loop ends before it.

        Raises:
            EngineDeadError: the loop has ended.
        """
        with self._lock:
            if self._open is None:
                work.close()
                raise EngineDeadError(f"the thread {self._thread.name!r} has ended")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._open[future] = work
        future.add_done_callback(self._forget)
        return future

    def call_soon(self, act: Callable[[], object]) -> None:
        """Let the loop call ``act``; no effect once it has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    def stop(self, farewell: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Let the loop end after ``farewell``; idempotent, from any thread, does not wait."""
        self._farewell = self._farewell or farewell
        self.call_soon(self._stop.set)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def _forget(self, future: "Future[Any]") -> None:
        # Without the lock: this runs in whichever thread ends the work, also in the one that holds it.
        if (still_open := self._open) is not None:
            still_open.pop(future, None)

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        finally:
            with self._lock:
                left, self._open = self._open or {}, None
            for future, work in list(left.items()):  # a copy: ``_forget`` in another thread may hold the table still
                future.cancel()
                work.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._started.set()
        await self._stop.wait()
        if self._farewell is not None:
            await self._farewell()
