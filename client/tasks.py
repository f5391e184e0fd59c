"""Tasks that do not keep their owner alive, and an event loop in a thread for callers that have none."""

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol, TypeVar

from engine.wire.errors import EngineDeadError

_log = logging.getLogger(__name__)

C = TypeVar("C")
T = TypeVar("T")


def loop_is_running() -> bool:
    """Tell whether the caller runs inside an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Fillable(Protocol):
    """What a task waits for until something is in it; a ``Mailbox``."""

    async def wait(self) -> None:
        """Return when there is an item."""


async def whenever_filled(owner_ref: "weakref.ref[C]", mailbox: Fillable, act: Callable[[C], None]) -> None:
    """Call ``act(owner)``, which empties the mailbox, whenever something is in it; return when the owner is gone.

    The owner is held only during the call: a task that held it while waiting would keep it from being collected.
    """
    while True:
        await mailbox.wait()
        owner = owner_ref()
        if owner is None:
            return
        act(owner)
        del owner


async def every(period_s: float, owner_ref: "weakref.ref[C]", act: Callable[[C], None]) -> None:
    """Call ``act(owner)`` now and every ``period_s`` seconds; return when the owner is gone."""
    while True:
        owner = owner_ref()
        if owner is None:
            return
        act(owner)
        del owner
        await asyncio.sleep(period_s)


def log_failure(task: "asyncio.Task[None]") -> None:
    """Observe how a task ended that nobody awaits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed", task.get_name(), exc_info=error)


class LoopThread:
    """An event loop in a thread of its own, which runs coroutines for callers in other threads until it is stopped.

    Synchronous callers need no loop then, and may have one running (a notebook). The thread is a daemon: it keeps no
    interpreter alive.

    _farewell: what the loop does last; written before ``_stop`` is set, read after it.
    _open: work that was handed over and has not ended, None once the loop has; under ``_lock``, so that no work can be
        handed to a loop that will not look at it any more and be waited for in vain.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._open: dict[Future[Any], Coroutine[Any, Any, Any]] | None = {}
        self._loop = asyncio.new_event_loop()  # takes work at once; what comes before it runs waits in it
        self._stop = asyncio.Event()
        self._farewell: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            with self._lock:
                left, self._open = self._open or {}, None
            for future, work in list(left.items()):  # a copy: ``_forget`` in another thread may hold the table still
                future.cancel()
                work.close()

    async def _serve(self) -> None:
        await self._stop.wait()
        if self._farewell is not None:
            await self._farewell()
