"""The client on an event loop: one task receives and acts, everybody else awaits."""

import asyncio
import logging
import time
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from client.calls import UtilityCalls
from client.config import ClientConfig
from client.connection_table import Change, Closed, Gone, Opened
from client.engine_connection import EngineConnection
from client.mailbox import Arrival, HandshakeFrames, Mailbox, OutputHandler, PendingResults
from client.mp_client import MPClient
from client.routing import Routing, SingleEngineRouting
from client.tasks import every, log_failure, loop_is_running, whenever_filled
from engine.wire.errors import StartupError
from engine.wire.ids import EngineId
from engine.wire.messages import (
    EEP_NOTIFICATION_CALL_ID,
    AddRequest,
    EngineCoreOutputs,
    UtilityOutput,
)
from engine.wire.tensors import Frames

_log = logging.getLogger(__name__)

HEARTBEAT_S = 0.2
MAX_QUEUED_OUTPUTS = 1024


class AsyncMPClient(MPClient):
    """Serves one engine (subclasses: many) from one event loop, without threads.

    Receivers append raw frames to ``_inbox``; the one output task takes them out and is the only code that opens and
    closes connections. It starts with the first call made inside a running loop, and holds the client only while it
    works, so a client that nobody uses any more is collected and its tasks end.

    _routing: where sequences go, and what happens when an engine dies. _results: what callers wait for.
    """

    _routing: Routing

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config)
        self._inbox: Mailbox[Arrival] = Mailbox()
        self._results = PendingResults(UtilityCalls(self.client_id, self._sender))
        self._routing = self._make_routing()
        self._notification_tasks: set[asyncio.Task[None]] = set()
        self._has_tasks = False
        self._is_receiving = False
        self._is_paused = False
        # Of the class, as in the reference: a bound method kept here would keep the client from being collected.
        self._process_outputs = type(self).process_engine_outputs
        if loop_is_running():
            self._ensure_output_queue_task()

    # --- what subclasses change -------------------------------------------------------------------------------------

    def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        """See every batch before its consumer does, and change it; the default does neither.

        Synchronous, so that a batch and what it changes are one step. Called as the class defines it.
        """

    async def eep_process_engine_core_notification(self, engine_id: EngineId, notification: Any) -> None:
        """Act on a notification of an elastic change, in a task of its own; the default counts and drops it."""
        self._drop_counter.drop("unhandled_notifications", str(engine_id))

    def _make_routing(self) -> Routing:
        return SingleEngineRouting(self.client_id, self._engines, self._sender, self._results)

    def _on_opened(self, connection: EngineConnection) -> None:
        """Take an engine that has shaken hands."""
        ready = connection.ready
        _log.info("engine %s is ready on %s (%s)", ready.engine_id, ready.node or "this node", ready.device)
        self._routing.on_opened(connection)

    def _on_unknown_gone(self, gone: Gone) -> None:
        """Take the end of an engine that never shook hands. Here it was the only one: nothing more will come."""
        self._results.end(gone.reason, gone.engine_id)

    def _on_request_sent(self) -> None:
        """Act behind a request that was sent."""

    def _describe_missing(self) -> list[str]:
        return self._engines.describe_missing()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """Send one sequence to an engine; see the base class. Nothing in here waits."""
        self._ensure_open()
        request.client_id = self.client_id
        engine_id = self._routing.route(request, data_parallel_rank)
        self._on_request_sent()
        return engine_id

    async def abort_requests_async(self, request_ids: Sequence[int]) -> None:
        """Abort requests of one sample each; this class does not track samples, ``DPLBAsyncMPClient`` does."""
        self._ensure_open()
        self._routing.abort(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the next batch; see the base class. Batches that came before the end are handed out before it."""
        if self._results.outputs.error is None:
            self._ensure_tasks()
        outputs = await self._results.outputs.get()
        if self._is_paused and len(self._results.outputs) < MAX_QUEUED_OUTPUTS // 2:
            self._is_paused = False
            self._resources.receive_outputs(self._on_output_message)
        return outputs

    async def consume_outputs(self, handler: OutputHandler) -> None:
        """Handle every batch from where it arrives; see the base class."""
        self._ensure_open()
        while len(self._results.outputs):  # what came before; does not wait
            handler(await self.get_output_async())
        await self._results.consume(handler)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of the engine; see the base class."""
        self._ensure_open()
        return await self._results.calls.call(self._engines.only(), method, args)

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - it travels to the engine; the caller may add its own
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method on the workers of the engine, through its utility method ``collective_rpc``.

        timeout: seconds, passed on to the engine.
        """
        return [await self.call_utility_async("collective_rpc", method, timeout, list(args), dict(kwargs or {}))]

    # --- start and end ----------------------------------------------------------------------------------------------

    async def wait_ready(self, timeout_s: float, num_engines: int = 1) -> None:
        """Wait until that many engines have shaken hands.

        Raises:
            StartupError: they have not within ``timeout_s``, or an engine was refused; names what is missing and why.
        """
        self._ensure_open()
        engines, changed = self._engines, self._results.engines_changed
        try:
            async with asyncio.timeout(timeout_s):
                while engines.num_ready < num_engines and not engines.refused:
                    self._results.ensure_open()
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass
        if engines.num_ready < num_engines:
            count = f"{engines.num_ready} of {num_engines} engines ready within {timeout_s:g} s"
            raise StartupError("; ".join([count, *self._describe_missing()]))

    async def aclose(self) -> None:
        """Leave the group and close everything; idempotent."""
        if self._resources.closed:
            return
        self._report(leaving=True)
        self._resources.let_reports_linger()
        tasks = [*self._resources.tasks, *self._notification_tasks]
        for task in tasks:
            task.cancel()
        self._finalizer()
        self._results.end("the client was closed")
        await asyncio.gather(*tasks, return_exceptions=True)

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = {
            "utility_calls": len(self._results.calls),
            "queued_outputs": len(self._results.outputs),
            "queued_arrivals": len(self._inbox),
        }
        return {**super().statistics(), **held, **self._routing.statistics()}

    def _ensure_open(self) -> None:
        """Every public coroutine comes through here: raise once the end has come, start the tasks with the first."""
        self._results.ensure_open()
        self._ensure_tasks()

    def _ensure_tasks(self) -> None:
        if not self._has_tasks:
            self._start_tasks()
            self._has_tasks = True

    def _start_tasks(self) -> None:
        self._ensure_output_queue_task()

    def _ensure_output_queue_task(self) -> None:
        """Start to receive and to report, once."""
        if self._is_receiving:
            return
        self._is_receiving = True
        arrivals = self._inbox
        self._resources.receive_requests(lambda frames: arrivals.put(HandshakeFrames(frames)))
        owner = weakref.ref(self)

        def on_outputs(frames: Frames) -> None:
            client = owner()
            if client is not None and not client._take_at_once(frames):
                arrivals.put(frames)

        self._on_output_message = on_outputs
        self._resources.receive_outputs(on_outputs)
        self._start_task("output", whenever_filled(owner, arrivals, lambda client: client._on_inbox()))
        self._start_task("heartbeat", every(HEARTBEAT_S, owner, lambda client: client._on_heartbeat(time.monotonic())))

    def _start_task(self, name: str, body: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(body, name=f"client {self.client_id} {name}")
        self._resources.tasks.append(task)
        task.add_done_callback(self._results.on_task_done)

    # --- what the tasks do ------------------------------------------------------------------------------------------

    def _on_heartbeat(self, now: float) -> None:
        """Report that the client lives, and look at what time alone changes. now: monotonic seconds."""
        self._report()
        for connection in self._engines.connections.values():
            self._sender.resend(connection, now)
        self._routing.on_time(now)
        self._routing.settle()

    def _on_inbox(self) -> None:
        """Take everything that arrived, in order: one turn of the output task."""
        for arrival in self._inbox.drain():
            if isinstance(arrival, list):
                self._on_output_frames(arrival)
            elif isinstance(arrival, Gone):
                self._on_changes(self._engines.on_gone(*arrival))
            else:
                self._on_handshake_frames(arrival.frames)
        self._after_outputs()

    def _take_at_once(self, frames: Frames) -> bool:
        """Take a batch without waking the output task; False when something waits for that, and comes first.

        The task goes on to take what is rare, and its end is still the client's.
        """
        if len(self._inbox) or self._results.outputs.error is not None:
            return False
        try:
            self._on_output_frames(frames)
            self._after_outputs()
        except Exception as error:  # noqa: BLE001 - as when the output task fails
            _log.exception("client %s: a batch could not be taken", self.client_id)
            self._results.end(f"a batch could not be taken: {error!r}")
        return True

    def _after_outputs(self) -> None:
        self._routing.settle()
        if len(self._results.outputs) >= MAX_QUEUED_OUTPUTS and self._resources.pause_outputs():
            # The socket fills, then those of the engines, and they merge in their output queues.
            self._is_paused = True
            self._counts["output_pauses"] += 1

    def _on_handshake_frames(self, frames: Frames) -> None:
        ready = self._decode_handshake(frames)
        if ready is None:
            return
        self._on_changes(self._engines.on_ready(ready, time.monotonic()))
        for early in self._engines.take_early(ready.engine_id):
            self._on_output_frames(early)

    def _on_output_frames(self, frames: Frames) -> None:
        """Take one batch of an engine: its way ends in ``PendingResults.deliver``."""
        outputs = self._decode_outputs(frames)
        if outputs is None:
            return
        connection = self._engines.connections.get(outputs.engine_id)
        if connection is None:
            self._on_changes(self._engines.on_unknown_outputs(outputs, frames))
            return
        if missing := connection.on_out_seq(outputs.out_seq):
            self._counts["output_gaps"] += missing
            self._routing.on_outputs_lost(connection, outputs)
        connection.on_applied(outputs.applied)
        if outputs.utility_output is not None:
            self._on_utility_output(outputs.engine_id, outputs.utility_output)
        if outputs.outputs:
            self._process_outputs(self, outputs)
        if outputs.outputs:  # the hook may have taken all of them out
            self._results.deliver(outputs)
        if outputs.dead is not None:  # last words: behind the outputs that came with them
            self._on_changes(self._engines.on_gone(outputs.engine_id, outputs.dead))

    def _on_changes(self, changes: Iterable[Change]) -> None:
        """Act on what became of engines; for their sequences and calls ``Routing`` does."""
        for change in changes:
            match change:
                case Opened():
                    self._on_opened(change.connection)
                case Closed():
                    self._routing.on_closed(change)
                case Gone():
                    self._on_unknown_gone(change)
            self._results.engines_changed.set()

    def _on_utility_output(self, engine_id: EngineId, output: UtilityOutput) -> None:
        if output.call_id != EEP_NOTIFICATION_CALL_ID:
            if not self._results.calls.resolve(engine_id, output):
                self._drop_counter.drop("unexpected_utility_outputs", str(engine_id))
            return
        notice = self.eep_process_engine_core_notification(engine_id, output.result)
        task = asyncio.create_task(notice, name=f"client {self.client_id} notification of {engine_id}")
        self._notification_tasks.add(task)
        task.add_done_callback(self._notification_tasks.discard)
        task.add_done_callback(log_failure)
