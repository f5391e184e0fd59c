"""The client for callers without an event loop: the same client in a thread of its own, and a queue of its batches."""

import asyncio
import queue
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from client.config import ClientConfig
from client.dplb_async_mp_client import DPLBAsyncMPClient
from client.tasks import LoopThread
from engine.wire.errors import EngineDeadError
from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, EngineCoreOutputs
from lb.views.engine_view import EngineView

MAX_UNREAD_BATCHES = 256

T = TypeVar("T")


class SyncMPClient:
    """What ``DPLBAsyncMPClient`` can do, method by method without ``_async``, for offline batch use.

    A daemon thread runs that client on an event loop, and a ``queue.Queue`` brings its batches back. So picks, aborts,
    deaths and handshakes are the same code, and its properties hold here: a second implementation on a polling thread,
    as in the reference, would have to repeat every one of them.

    Methods may be called from several threads. Neither the thread nor the queue holds this object: one that is dropped
    ends its thread. When the thread ends by itself, every call that waits, and every later one, gets
    ``EngineDeadError``.
    """

    def __init__(self, config: ClientConfig) -> None:
        """Start the thread and open the client in it.

        Raises:
            AddressError: an endpoint cannot be bound or connected.
        """
        self._thread = LoopThread(f"client {config.client_id}")
        try:
            # On its own loop: the caller may have one running, and a client starts its tasks on the one it finds.
            client = self._thread.run(_on_loop(partial(DPLBAsyncMPClient, config)))
        except BaseException:
            self._thread.stop()
            self._thread.join()
            raise
        self._finalizer = weakref.finalize(self, _finalize, self._thread, client)
        self.client_id = client.client_id
        self.request_ids = client.request_ids
        self._client = client
        self._outputs = SyncOutputs()
        self._thread.submit(self._outputs.fill(client.get_output_async)).add_done_callback(self._outputs.on_filled)

    def add_request(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """See ``DPLBAsyncMPClient.add_request_async``."""
        return self._thread.run(self._client.add_request_async(request, data_parallel_rank))

    def abort_requests(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        """See ``DPLBAsyncMPClient.abort_requests_async``."""
        self._thread.run(self._client.abort_requests_async(request_ids, sample_index))

    def get_output(self, timeout_s: float | None = None) -> EngineCoreOutputs:
        """Wait for the next batch of outputs of one engine.

        Raises:
            EngineDeadError: nothing more will come; raised again by every later call.
            TimeoutError: nothing came within ``timeout_s``; None waits for ever.
        """
        return self._outputs.get(timeout_s, self._thread.call_soon)

    def call_utility(self, method: str, *args: Any) -> dict[int, Any]:
        """See ``DPLBAsyncMPClient.call_utility_async``."""
        return self._thread.run(self._client.call_utility_async(method, *args))

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See ``DPLBAsyncMPClient.collective_rpc_async``."""
        return self._thread.run(self._client.collective_rpc_async(method, timeout, args, kwargs))

    def wait_ready(self, timeout_s: float, num_engines: int = 1) -> None:
        """See ``AsyncMPClient.wait_ready``."""
        self._thread.run(self._client.wait_ready(timeout_s, num_engines))

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, one per rank, in the order of the ranks."""
        return self._thread.run(_on_loop(self._client.engine_views))

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = self._thread.run(_on_loop(self._client.statistics))
        return {**held, "unread_batches": len(self._outputs)}

    def close(self) -> None:
        """Leave the group, close everything and wait for the thread; idempotent."""
        self._finalizer()
        self._thread.join()
        self._client.close_sockets()  # a thread that had ended by itself could not


class SyncOutputs:
    """A ``queue.Queue`` that one task on the loop fills; after its end every ``get`` raises, not only the first.

    At ``limit`` unread batches the task stops taking them from the client, which then pushes back on the engines.
    Does not hold the synchronous client.

    _is_full: the task waits for room; written by it, read by callers. _room: touched on the loop alone.
    """

    def __init__(self, limit: int = MAX_UNREAD_BATCHES) -> None:
        self._limit = limit
        self._queue: queue.Queue[EngineCoreOutputs | EngineDeadError] = queue.Queue()
        self._room = asyncio.Event()
        self._is_full = False

    def __len__(self) -> int:
        return self._queue.qsize()

    async def fill(self, get_output: Callable[[], Awaitable[EngineCoreOutputs]]) -> None:
        """Hand over every batch until there are no more, which ``get_output`` raises."""
        while True:
            self._queue.put(await get_output())
            if len(self) >= self._limit:
                await self._wait_room()

    async def _wait_room(self) -> None:
        # Until half of the batches are taken: one wake-up of the loop for many of them.
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
            self._queue.put(item)  # for the next caller, who shall not wait for ever
            raise item.with_traceback(None)
        if self._is_full and len(self) <= self._limit // 2:
            call_soon(self._room.set)
        return item


async def _on_loop(look: Callable[[], T]) -> T:
    """Call on the loop what must not be called beside it."""
    return look()


def _finalize(thread: LoopThread, client: DPLBAsyncMPClient) -> None:
    """Let the thread end with its client; from any thread, also in the collector's, so it does not wait."""
    thread.stop(client.aclose)
