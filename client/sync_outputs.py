"""The way of batches from an event loop to callers that wait in threads."""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from client.async_mp_client import AsyncMPClient
from engine.wire.errors import EngineDeadError
from engine.wire.messages import EngineCoreOutputs

MAX_UNREAD_BATCHES = 256


class SyncOutputs:
    """A ``queue.Queue`` that one task on the loop fills; after its end every ``get`` raises, not only the first.

    At ``limit`` unread batches the task stops taking them from the client, which then pushes back on the engines.
    Holds neither the client nor its synchronous owner.
    """

    def __init__(self, limit: int = MAX_UNREAD_BATCHES) -> None:
        self._limit = limit
        self._queue: queue.Queue[EngineCoreOutputs | EngineDeadError] = queue.Queue()
        self._room = asyncio.Event()  # touched on the loop alone
        self._is_full = False  # written by the task, read by callers

    def __len__(self) -> int:
        return self._queue.qsize()

    async def fill(self, client: AsyncMPClient) -> None:
        """Hand over every batch until there are no more."""
        while True:
            self._queue.put(await client.get_output_async())
            if len(self) >= self._limit:
                await self._wait_room()

    async def _wait_room(self) -> None:
        """Wait until half of the batches are taken."""
        self._room.clear()
        self._is_full = True
        # Looked at again: callers that took them before they could know that they are waited for have set nothing.
        if len(self) > self._limit // 2:
            await self._room.wait()
        self._is_full = False

    def on_filled(self, filling: "Future[None]") -> None:
        """Note that ``fill`` has ended: let callers have the reason once they have had the batches."""
        error = None if filling.cancelled() else filling.exception()
        if not isinstance(error, EngineDeadError):
            error = EngineDeadError(f"the output task failed: {error!r}" if error else "the client's thread has ended")
        self._queue.put(error)

    def get(self, timeout_s: float | None, call_soon: Callable[[Callable[[], Any]], None]) -> EngineCoreOutputs:
        """Wait for the next batch. call_soon: lets the loop call something.

        Raises:
            EngineDeadError: nothing more will come. TimeoutError: nothing came within ``timeout_s``.
        """
        try:
            item = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no outputs within {timeout_s:g} s") from None
        if isinstance(item, EngineDeadError):
            self._queue.put(item)
            raise item.with_traceback(None)
        if self._is_full and len(self) <= self._limit // 2:
            call_soon(self._room.set)
        return item
