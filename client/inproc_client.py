"""The client of engines in this process: the behaviour of the others, with threads in place of sockets."""

import asyncio
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from client.calls import UtilityCalls
from client.connection_table import Closed, ConnectionTable
from client.core_client import EngineCoreClient
from client.core_thread import Core, CoreThread, ThreadToLoopQueue
from client.engine_connection import MAX_UNAPPLIED_MESSAGES, EngineConnection
from client.mailbox import OutputHandler, PendingResults
from client.migration import MigrationConfig
from client.routing import MADE_HERE, BalancedRouting
from client.views import make_views
from engine.wire.drop_counter import DropCounter
from engine.wire.ids import ClientId, EngineId, RequestIds
from engine.wire.messages import AddRequest, ChannelMessage, EngineCoreOutputs, EngineReady
from lb.views.engine_view import EngineView
from lb.views.totals import RankTotals

MakeCore = Callable[[EngineId], tuple[EngineReady, Core]]
"""Loads one rank, in the thread that makes the client."""

MAX_UNREAD_BATCHES = 256

_MIGRATIONS = MigrationConfig(suspect_rest_s=0.0)
"""Engines of one process are never killed together and heard of singly."""

_JOIN_S = 30.0
_LAST_MOMENT_S = 0.1


class InprocClient(EngineCoreClient):
    """Serves engines that live in threads of this process, for offline use and tests.

    Picks, in-flight table, message numbers and ends are those of ``DPLBAsyncMPClient``. As the only client of its
    engines it needs no load reports: what it has in flight is the load. A client that is dropped ends its threads.
    """

    def __init__(self, make_core: MakeCore, num_engines: int = 1) -> None:
        """Load the engines, ranks 0..n-1, one after the other; may be called without a running loop.

        Raises:
            StartupError: whatever ``make_core`` raises; the engines loaded before are closed.
        """
        self.client_id = ClientId(0, 1)
        self.request_ids = RequestIds(self.client_id)
        self._outputs_queue: ThreadToLoopQueue[EngineCoreOutputs] = ThreadToLoopQueue(
            self._on_outputs, MAX_UNREAD_BATCHES
        )
        self._threads: dict[EngineId, CoreThread] = {}
        self._finalizer = weakref.finalize(self, _finalize, self._outputs_queue, self._threads)
        self._counts: Counter[str] = Counter()
        self._engines = ConnectionTable(None, self._counts, DropCounter())
        sender = _ThreadSender(self._threads)
        self._results = PendingResults(UtilityCalls(self.client_id, sender))
        parts = self.client_id, self._engines, sender, self._results, self._counts
        # Nobody loads an engine anew here.
        self._routing = BalancedRouting(*parts, _MIGRATIONS, engines_are_replaced=False)
        try:
            for rank in range(num_engines):
                self._open(*make_core(EngineId(rank, 1)))
        except BaseException:
            self._finalizer()
            raise

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """Pick an engine and hand it one sequence; see the base class. Nothing in here waits."""
        self._ensure_open()
        request.client_id = self.client_id
        return self._routing.route(request, data_parallel_rank)

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        """Abort requests, all samples of each, or this one alone. Unknown ids are no-ops."""
        self._ensure_open()
        self._routing.abort(request_ids, sample_index)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the next batch; see the base class. Batches that came before the end are handed out before it."""
        outputs = await self._results.outputs.get()
        if outputs.out_seq != MADE_HERE:
            self._outputs_queue.release()
        return outputs

    async def consume_outputs(self, handler: OutputHandler) -> None:
        """Handle every batch from where it arrives; see the base class."""
        self._ensure_open()
        while len(self._results.outputs):  # what came before; does not wait
            handler(await self.get_output_async())
        await self._results.consume(handler)

    async def call_utility_async(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of every engine; return rank -> result.

        Raises:
            UtilityError: it failed on some ranks; holds their reasons and the others' results.
            EngineDeadError: no engine is there.
        """
        self._ensure_open()
        return await self._results.calls.call_ranks(self._engines.connections, method, args)

    async def aclose(self) -> None:
        """End the engines after the steps they are in; idempotent. Calls that still wait get ``EngineDeadError``."""
        if self._finalizer.detach() is None:
            return
        _signal(self._outputs_queue, self._threads)
        self._results.end("the client was closed")
        # Not a join in another thread: at the interpreter's exit no thread can be started any more.
        ends = [asyncio.wrap_future(thread.ended) for thread in self._threads.values()]
        if ends:
            await asyncio.wait(ends, timeout=_JOIN_S)
        _join(self._threads, _LAST_MOMENT_S)

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, in the order of the ranks."""
        engines = self._engines
        return make_views(engines.connections, {}, {}, engines.gone, {}, {}, totals=RankTotals())

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = {"utility_calls": len(self._results.calls), "queued_outputs": len(self._results.outputs)}
        return {**self._counts, **self._engines.statistics(), **held, **self._routing.statistics()}

    def _open(self, ready: EngineReady, core: Core) -> None:
        self._engines.on_ready(ready, time.monotonic())
        self._routing.on_opened(self._engines.connections[ready.engine_id])
        self._threads[ready.engine_id] = CoreThread(ready.engine_id, core, self.client_id, self._outputs_queue.put)

    def _ensure_open(self) -> None:
        self._results.ensure_open()
        self._outputs_queue.bind(asyncio.get_running_loop())

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take what an engine's thread handed over; runs on the loop."""
        connection = self._engines.connections[outputs.engine_id]
        connection.on_applied(outputs.applied)
        if connection.blocked:  # for too many unapplied messages: there are fewer now
            connection.blocked = False
            self._routing.dispatcher.refresh()
        if outputs.utility_output is not None:
            self._results.calls.resolve(outputs.engine_id, outputs.utility_output)
        self._routing.dispatcher.on_outputs(outputs)
        if not outputs.outputs or self._results.deliver(outputs):
            self._outputs_queue.release()
        if outputs.dead is not None:
            self._on_dead(outputs.engine_id, outputs.dead)
        self._routing.settle()
        if not self._engines.connections:
            self._results.end(f"no engine is left: {outputs.dead}", outputs.engine_id)

    def _on_dead(self, engine_id: EngineId, reason: str) -> None:
        for change in self._engines.on_gone(engine_id, reason):
            if isinstance(change, Closed):
                self._routing.on_closed(change)


class _ThreadSender:
    """Puts numbered messages into the inboxes of engines in threads; a ``Sender``."""

    def __init__(self, threads: dict[EngineId, CoreThread]) -> None:
        self._threads = threads

    def send(self, connection: EngineConnection, message: ChannelMessage) -> None:
        """See ``Sender``; an inbox takes everything, and nothing is lost on the way to it."""
        self._threads[connection.engine_id].post(connection.stage(message))

    def send_add(self, connection: EngineConnection, request: AddRequest) -> bool:
        """See ``Sender``; an engine that applies nothing for too long takes no new requests."""
        if connection.num_unapplied >= MAX_UNAPPLIED_MESSAGES:
            connection.blocked = True
            return False
        self.send(connection, request)
        return True


def _signal(outputs_queue: ThreadToLoopQueue[EngineCoreOutputs], threads: dict[EngineId, CoreThread]) -> None:
    outputs_queue.close()
    for thread in threads.values():
        thread.stop()


def _join(threads: dict[EngineId, CoreThread], timeout_s: float) -> None:
    for thread in threads.values():
        thread.join(timeout_s)


def _finalize(outputs_queue: ThreadToLoopQueue[EngineCoreOutputs], threads: dict[EngineId, CoreThread]) -> None:
    """End the threads of a client that was dropped, or is there when the interpreter exits.

    Garbage collection may run this in any thread, one of those included, so only the main thread waits.
    """
    _signal(outputs_queue, threads)
    if threading.current_thread() is threading.main_thread():
        _join(threads, _JOIN_S)
