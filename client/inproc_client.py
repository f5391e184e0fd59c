"""The client of engines in this process: the behaviour of the others, with threads in place of sockets."""

import asyncio
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from client.answers import Answers
from client.config import MoveConfig
from client.core_client import EngineCoreClient
from client.core_thread import NO_REPORT, Core, CoreThread
from client.dispatcher import Dispatcher
from client.engine_line import EngineLine
from client.handover import Handover
from client.sender import MAX_UNAPPLIED_MESSAGES
from client.utility_calls import UtilityCalls, gather_ranks
from client.views import make_views
from engine.wire.ids import ClientId, EngineId, RequestIds
from engine.wire.messages import (
    AddRequest,
    EngineCoreOutputs,
    EngineReady,
    LineMessage,
    UtilityRequest,
)
from engine.wire.sockets import SendOutcome
from lb.picker import RotatingPicker
from lb.totals import RankTotals
from lb.views import EngineView

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
        self._handover: Handover[EngineCoreOutputs] = Handover(self._on_outputs, MAX_UNREAD_BATCHES)
        self._threads: dict[EngineId, CoreThread] = {}
        self._finalizer = weakref.finalize(self, _finalize, self._handover, self._threads)
        self._lines: dict[EngineId, EngineLine] = {}
        self._gone: dict[EngineId, str] = {}
        self._counts: Counter[str] = Counter()
        self._utility_calls = UtilityCalls()
        self._answers = Answers(self._utility_calls)
        self._sender = _ThreadSender(self._threads)
        picker = RotatingPicker(self.client_id.index)
        moves = MoveConfig(suspect_rest_s=0.0)  # engines of one process are never killed together and heard of singly
        self._dispatcher = Dispatcher(self._lines, picker, self._sender, self._counts, moves)
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
        return self._dispatcher.place(request, data_parallel_rank).engine_id

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        """Abort requests, all samples of each, or this one alone. Unknown ids are no-ops."""
        self._ensure_open()
        for request_id in request_ids:
            self._dispatcher.abort(request_id, sample_index)
        if ends := self._dispatcher.take_ends():
            self._answers.outputs.put(EngineCoreOutputs(_NO_ENGINE, self.client_id, _MADE_HERE, 0, NO_REPORT, ends))

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the next batch; see the base class. Batches that came before the end are handed out before it."""
        outputs = await self._answers.outputs.get()
        if outputs.out_seq != _MADE_HERE:
            self._handover.release()
        return outputs

    async def call_utility_async(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of every engine; return rank -> result.

        Raises:
            UtilityError: it failed on some ranks; holds their reasons and the others' results.
            EngineDeadError: no engine is there.
        """
        self._ensure_open()
        lines = [self._lines[engine_id] for engine_id in sorted(self._lines)]
        return await gather_ranks(
            method, {line.engine_id.rank: self._call_engine(line, method, args) for line in lines}
        )

    async def aclose(self) -> None:
        """End the engines after the steps they are in; idempotent. Calls that still wait get ``EngineDeadError``."""
        if self._finalizer.detach() is None:
            return
        _signal(self._handover, self._threads)
        self._answers.end("the client was closed")
        # Not a join in another thread: at the interpreter's exit no thread can be started any more.
        ends = [asyncio.wrap_future(thread.ended) for thread in self._threads.values()]
        if ends:
            await asyncio.wait(ends, timeout=_JOIN_S)
        _join(self._threads, _LAST_MOMENT_S)

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, in the order of the ranks."""
        return make_views(self._lines, {}, {}, self._gone, {}, {}, num_clients=1, totals=RankTotals())

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = {
            "engines": len(self._lines),
            "in_flight": len(self._dispatcher.in_flight),
            "waiting_to_move": self._dispatcher.num_waiting,
            "unmovable": self._dispatcher.num_unmovable,
            "unapplied_messages": sum(line.num_unapplied for line in self._lines.values()),
            "utility_calls": len(self._utility_calls),
            "queued_outputs": len(self._answers.outputs),
        }
        return {**self._counts, **held}

    def _open(self, ready: EngineReady, core: Core) -> None:
        self._lines[ready.engine_id] = EngineLine(ready, time.monotonic())
        self._threads[ready.engine_id] = CoreThread(ready.engine_id, core, self.client_id, self._handover.put)

    def _ensure_open(self) -> None:
        self._answers.ensure_open()
        self._handover.bind(asyncio.get_running_loop())

    def _call_engine(self, line: EngineLine, method: str, args: Sequence[Any]) -> "asyncio.Future[Any]":
        def send(call_id: int) -> None:
            self._sender.send(line, UtilityRequest(self.client_id, 0, call_id, method, list(args)))

        return self._utility_calls.ask(line.engine_id, method, send)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take what an engine's thread handed over; runs on the loop."""
        line = self._lines[outputs.engine_id]
        line.on_applied(outputs.applied)
        if line.blocked:
            line.blocked = False
            self._dispatcher.refresh()
        if outputs.utility_output is not None:
            self._utility_calls.resolve(outputs.engine_id, outputs.utility_output)
        if outputs.dead is None:
            self._dispatcher.on_outputs(outputs)
        else:
            self._close_line(line, outputs.dead)
        self._dispatcher.send_waiting()
        outputs.outputs += self._dispatcher.take_ends()
        if outputs.outputs:
            self._answers.outputs.put(outputs)
        else:
            self._handover.release()
        if not self._lines:
            self._answers.end(f"no engine is left: {outputs.dead}", outputs.engine_id)

    def _close_line(self, line: EngineLine, reason: str) -> None:
        """End an engine that died; what it had goes on elsewhere, while that risks no more than it saves.

        Nobody loads an engine anew here. So the last one is not given what may have killed another.
        """
        del self._lines[line.engine_id]
        self._gone[line.engine_id] = reason
        self._utility_calls.fail_engine(line.engine_id, reason)
        self._dispatcher.on_line_closed(line, f"engine {line.engine_id}: {reason}")
        if not self._lines:
            self._dispatcher.end_waiting("no engine is left")
        elif len(self._lines) == 1:
            self._dispatcher.end_waiting("it may be the reason and is not tried on the last engine", suspects_only=True)


class _ThreadSender:
    """Puts numbered messages into the inboxes of engines in threads; implements ``client.sender.Sender``."""

    def __init__(self, threads: dict[EngineId, CoreThread]) -> None:
        self._threads = threads

    def send(self, line: EngineLine, message: LineMessage) -> SendOutcome:
        """See ``Sender``; an inbox takes everything, and nothing is lost on the way to it."""
        self._threads[line.engine_id].post(line.stage(message))
        return SendOutcome.ACCEPTED

    def send_add(self, line: EngineLine, request: AddRequest) -> bool:
        """See ``Sender``; an engine that applies nothing for too long takes no new requests."""
        if line.num_unapplied >= MAX_UNAPPLIED_MESSAGES:
            line.blocked = True
            return False
        self.send(line, request)
        return True


def _signal(handover: Handover[EngineCoreOutputs], threads: dict[EngineId, CoreThread]) -> None:
    handover.close()
    for thread in threads.values():
        thread.stop()


def _join(threads: dict[EngineId, CoreThread], timeout_s: float) -> None:
    for thread in threads.values():
        thread.join(timeout_s)


def _finalize(handover: Handover[EngineCoreOutputs], threads: dict[EngineId, CoreThread]) -> None:
    """End the threads of a client that was dropped, or is there when the interpreter exits.

    Garbage collection may run this in any thread, one of those included, so only the main thread waits.
    """
    _signal(handover, threads)
    if threading.current_thread() is threading.main_thread():
        _join(threads, _JOIN_S)
