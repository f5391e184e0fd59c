"""The client of engines in this process: the behaviour of the others, with threads in place of sockets."""

import asyncio
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from client.config import MigrationConfig
from client.core_client import EngineCoreClient
from client.core_thread import NO_REPORT, Core, CoreThread
from client.dispatcher import Dispatcher
from client.engine_connection import EngineConnection
from client.pending_results import PendingResults
from client.sender import MAX_UNAPPLIED_MESSAGES
from client.thread_to_loop_queue import ThreadToLoopQueue
from client.utility_calls import UtilityCalls, gather_ranks
from client.views import make_views
from engine.wire.ids import ClientId, EngineId, RequestIds
from engine.wire.messages import AddRequest, ChannelMessage, EngineCoreOutputs, EngineReady, UtilityRequest
from engine.wire.sockets import SendOutcome
from lb.routing.picker import RotatingPicker
from lb.views.engine_view import EngineView
from lb.views.totals import RankTotals

MakeCore = Callable[[EngineId], tuple[EngineReady, Core]]
"""Loads one rank, in the thread that makes the client."""

MAX_UNREAD_BATCHES = 256
_NO_ENGINE = EngineId(0, 0)
_MADE_HERE = 0
"""``out_seq`` of a batch that no engine's thread handed over; theirs count from 1."""

_JOIN_S = 30.0
_LAST_MOMENT_S = 0.1


class InprocClient(EngineCoreClient):
    """Serves engines that live in threads of this process, for offline use and tests.

    Picks, in-flight table, line numbers and ends are those of ``DPLBAsyncMPClient``. As the only client of its engines
    it needs no load reports: what it has in flight is the load. A client that is dropped ends its threads.
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
        self._connections: dict[EngineId, EngineConnection] = {}
        self._gone: dict[EngineId, str] = {}
        self._counts: Counter[str] = Counter()
        self._utility_calls = UtilityCalls()
        self._pending = PendingResults(self._utility_calls)
        self._sender = _ThreadSender(self._threads)
        picker = RotatingPicker(self.client_id.index)
        migrations = MigrationConfig(
            suspect_rest_s=0.0
        )  # engines of one process are never killed together and heard of singly
        self._dispatcher = Dispatcher(self._connections, picker, self._sender, self._counts, migrations)
        try:
            for rank in range(num_engines):
                self._open(*make_core(EngineId(rank, 1)))
        except BaseException:
            self._finalizer()
            raise
        self._dispatcher.refresh()

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """Pick an engine and hand it one sequence; see the base class. Nothing in here waits."""
        self._ensure_open()
        request.client_id = self.client_id
        return self._dispatcher.route(request, data_parallel_rank).engine_id

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        """Abort requests, all samples of each, or this one alone. Unknown ids are no-ops."""
        self._ensure_open()
        for request_id in request_ids:
            self._dispatcher.abort(request_id, sample_index)
        if ends := self._dispatcher.take_ends():
            self._pending.outputs.put(EngineCoreOutputs(_NO_ENGINE, self.client_id, _MADE_HERE, 0, NO_REPORT, ends))

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the next batch; see the base class. Batches that came before the end are handed out before it."""
        outputs = await self._pending.outputs.get()
        if outputs.out_seq != _MADE_HERE:
            self._outputs_queue.release()
        return outputs

    async def call_utility_async(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of every engine; return rank -> result.

        Raises:
            UtilityError: it failed on some ranks; holds their reasons and the others' results.
            EngineDeadError: no engine is there.
        """
        self._ensure_open()
        connections = [self._connections[engine_id] for engine_id in sorted(self._connections)]
        return await gather_ranks(
            method,
            {connection.engine_id.rank: self._call_engine(connection, method, args) for connection in connections},
        )

    async def aclose(self) -> None:
        """End the engines after the steps they are in; idempotent. Calls that still wait get ``EngineDeadError``."""
        if self._finalizer.detach() is None:
            return
        _signal(self._outputs_queue, self._threads)
        self._pending.end("the client was closed")
        # Not a join in another thread: at the interpreter's exit no thread can be started any more.
        ends = [asyncio.wrap_future(thread.ended) for thread in self._threads.values()]
        if ends:
            await asyncio.wait(ends, timeout=_JOIN_S)
        _join(self._threads, _LAST_MOMENT_S)

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, in the order of the ranks."""
        return make_views(self._connections, {}, {}, self._gone, {}, {}, totals=RankTotals())

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = {
            "engines": len(self._connections),
            "in_flight": len(self._dispatcher.in_flight),
            "waiting_to_move": self._dispatcher.num_waiting,
            "unmovable": self._dispatcher.num_unmigratable,
            "unapplied_messages": sum(connection.num_unapplied for connection in self._connections.values()),
            "utility_calls": len(self._utility_calls),
            "queued_outputs": len(self._pending.outputs),
        }
        return {**self._counts, **held}

    def _open(self, ready: EngineReady, core: Core) -> None:
        self._connections[ready.engine_id] = EngineConnection(ready, time.monotonic())
        self._threads[ready.engine_id] = CoreThread(ready.engine_id, core, self.client_id, self._outputs_queue.put)

    def _ensure_open(self) -> None:
        self._pending.ensure_open()
        self._outputs_queue.bind(asyncio.get_running_loop())

    def _call_engine(self, connection: EngineConnection, method: str, args: Sequence[Any]) -> "asyncio.Future[Any]":
        def send(call_id: int) -> None:
            self._sender.send(connection, UtilityRequest(self.client_id, 0, call_id, method, list(args)))

        return self._utility_calls.ask(connection.engine_id, method, send)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take what an engine's thread handed over; runs on the loop."""
        connection = self._connections[outputs.engine_id]
        connection.on_applied(outputs.applied)
        if connection.blocked:
            connection.blocked = False
            self._dispatcher.refresh()
        if outputs.utility_output is not None:
            self._utility_calls.resolve(outputs.engine_id, outputs.utility_output)
        if outputs.dead is None:
            self._dispatcher.on_outputs(outputs)
        else:
            self._close_connection(connection, outputs.dead)
        self._dispatcher.send_waiting()
        outputs.outputs += self._dispatcher.take_ends()
        if outputs.outputs:
            self._pending.outputs.put(outputs)
        else:
            self._outputs_queue.release()
        if not self._connections:
            self._pending.end(f"no engine is left: {outputs.dead}", outputs.engine_id)

    def _close_connection(self, connection: EngineConnection, reason: str) -> None:
        """End an engine that died; what it had goes on elsewhere, while that risks no more than it saves.

        Nobody loads an engine anew here. So the last one is not given what may have killed another.
        """
        del self._connections[connection.engine_id]
        self._gone[connection.engine_id] = reason
        self._utility_calls.fail_engine(connection.engine_id, reason)
        self._dispatcher.on_connection_closed(connection, f"engine {connection.engine_id}: {reason}")
        if not self._connections:
            self._dispatcher.end_waiting("no engine is left")
        elif len(self._connections) == 1:
            self._dispatcher.end_waiting("it may be the reason and is not tried on the last engine", suspects_only=True)


class _ThreadSender:
    """Puts numbered messages into the inboxes of engines in threads; implements ``client.sender.Sender``."""

    def __init__(self, threads: dict[EngineId, CoreThread]) -> None:
        self._threads = threads

    def send(self, connection: EngineConnection, message: ChannelMessage) -> SendOutcome:
        """See ``Sender``; an inbox takes everything, and nothing is lost on the way to it."""
        self._threads[connection.engine_id].post(connection.stage(message))
        return SendOutcome.ACCEPTED

    def send_add(self, connection: EngineConnection, request: AddRequest) -> bool:
        """See ``Sender``; an engine that applies nothing for too long takes no new requests."""
        if connection.num_unapplied >= MAX_UNAPPLIED_MESSAGES:
            connection.blocked = True
            return False
        self.send(connection, request)
        return True


def _signal(thread_to_loop_queue: ThreadToLoopQueue[EngineCoreOutputs], threads: dict[EngineId, CoreThread]) -> None:
    thread_to_loop_queue.close()
    for thread in threads.values():
        thread.stop()


def _join(threads: dict[EngineId, CoreThread], timeout_s: float) -> None:
    for thread in threads.values():
        thread.join(timeout_s)


def _finalize(thread_to_loop_queue: ThreadToLoopQueue[EngineCoreOutputs], threads: dict[EngineId, CoreThread]) -> None:
    """End the threads of a client that was dropped, or is there when the interpreter exits.

    Garbage collection may run this in any thread, one of those included, so only the main thread waits.
    """
    _signal(thread_to_loop_queue, threads)
    if threading.current_thread() is threading.main_thread():
        _join(threads, _JOIN_S)
