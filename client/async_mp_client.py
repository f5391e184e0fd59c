"""The client on an event loop: one task receives, everybody else awaits."""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from client.config import ClientConfig
from client.engine_connection import EngineConnection
from client.inbox import Arrival, Handshake
from client.mailbox import Mailbox
from client.mp_client import MPClient
from client.pending_results import PendingResults
from client.tasks import every, log_failure, loop_is_running, whenever_filled
from engine.wire.errors import InvalidRequestError, OverloadedError, StartupError
from engine.wire.ids import EngineId
from engine.wire.messages import (
    EEP_NOTIFICATION_CALL_ID,
    AbortRequest,
    AddRequest,
    EngineCoreOutputs,
    UtilityOutput,
    UtilityRequest,
)
from engine.wire.sockets import AsyncReceiver
from engine.wire.tensors import Frames

_log = logging.getLogger(__name__)

HEARTBEAT_S = 0.2
MAX_QUEUED_OUTPUTS = 1024


class AsyncMPClient(MPClient):
    """Serves one engine (subclasses: many) from one event loop, without threads.

    Receivers append raw frames to ``_inbox``; the one output task takes them out and is the only code that changes
    what this client knows of its engines. It starts with the first call made inside a running loop, and holds the
    client only while it works, so a client that nobody uses any more is collected and its tasks end.

    Subclasses may define, looked up on the class because this class has neither:
        process_engine_outputs(self, outputs): sees every batch before the consumer and may change it. Synchronous, so
            that a batch and what it changes are one step.
        eep_process_engine_core_notification(self, engine_id, notification): coroutine, runs in its own task.
    """

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config)
        self._inbox: Mailbox[Arrival] = Mailbox()
        self._pending = PendingResults(self._utility_calls)
        self._output_receiver: AsyncReceiver | None = None
        self._request_receiver: AsyncReceiver | None = None
        self._notification_tasks: set[asyncio.Task[None]] = set()
        self._output_hook: Callable[[Any, EngineCoreOutputs], None] | None = getattr(
            type(self), "process_engine_outputs", None
        )
        self._notification_hook: Callable[[Any, EngineId, Any], Coroutine[Any, Any, None]] | None = getattr(
            type(self), "eep_process_engine_core_notification", None
        )
        if loop_is_running():
            self._ensure_output_queue_task()

    # --- requests ---

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """Send one sequence to the engine; see the base class."""
        self._ensure_open()
        connection = self._only_connection()
        if data_parallel_rank not in (None, connection.engine_id.rank):
            raise InvalidRequestError(
                f"data_parallel_rank {data_parallel_rank!r} takes no requests; valid: {connection.engine_id.rank}",
                "data_parallel_rank",
            )
        request.client_id = self.client_id
        if not self._sender.send_add(connection, request):
            raise OverloadedError(f"engine {connection.engine_id} takes no request now")
        return connection.engine_id

    async def abort_requests_async(self, request_ids: Sequence[int]) -> None:
        """Abort requests of one sample each; this class does not track samples, ``DPLBAsyncMPClient`` does."""
        self._ensure_open()
        connection = self._only_connection()
        for request_id in request_ids:
            self._sender.send(connection, AbortRequest(self.client_id, 0, request_id, sample_index=0, attempt=0))

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the next batch; see the base class. Batches that came before the end are handed out before it."""
        if self._pending.outputs.error is None:
            self._ensure_tasks()
        outputs = await self._pending.outputs.get()
        if self._output_receiver is None and len(self._pending.outputs) < MAX_QUEUED_OUTPUTS // 2:
            self._resume_outputs()
        return outputs

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of the engine; see the base class."""
        self._ensure_open()
        return await self._call_engine(self._only_connection(), method, args)

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

    # --- start and end ---

    async def wait_ready(self, timeout_s: float, num_engines: int = 1) -> None:
        """Wait until that many engines have shaken hands.

        Raises:
            StartupError: they have not within ``timeout_s``, or an engine was refused; names what is missing and why.
        """
        self._ensure_open()
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_ready() < num_engines and not self._refused:
                    self._pending.ensure_open()
                    self._pending.engines_changed.clear()
                    await self._pending.engines_changed.wait()
        except TimeoutError:
            pass
        if self._num_ready() < num_engines:
            count = f"{self._num_ready()} of {num_engines} engines ready within {timeout_s:g} s"
            raise StartupError("; ".join([count, *self._describe_missing()]))

    async def aclose(self) -> None:
        """Leave the group and close everything; idempotent."""
        if self._resources.closed:
            return
        self._announce(leaving=True)
        self._resources.let_reports_linger()
        tasks = [*self._resources.tasks, *self._notification_tasks]
        for task in tasks:
            task.cancel()
        self._finalizer()
        self._pending.end("the client was closed")
        await asyncio.gather(*tasks, return_exceptions=True)

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = {"queued_outputs": len(self._pending.outputs), "queued_arrivals": len(self._inbox)}
        return {**super().statistics(), **held}

    def _ensure_open(self) -> None:
        self._pending.ensure_open()
        self._ensure_tasks()

    def _ensure_tasks(self) -> None:
        self._ensure_output_queue_task()

    def _ensure_output_queue_task(self) -> None:
        """Start to receive, once; every public coroutine comes through here."""
        if self._request_receiver is not None:
            return
        arrivals = self._inbox
        self._request_receiver = self._resources.receive(
            self._resources.router, lambda frames: arrivals.put(Handshake(frames))
        )
        self._sender.receiver = self._request_receiver
        self._output_receiver = self._resources.receive(self._resources.outputs, arrivals.put)
        owner = weakref.ref(self)
        self._start_task("output", whenever_filled(owner, arrivals, lambda client: client._on_inbox()))
        self._start_task("heartbeat", every(HEARTBEAT_S, owner, lambda client: client._on_heartbeat(time.monotonic())))

    def _start_task(self, name: str, body: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(body, name=f"client {self.client_id} {name}")
        self._resources.tasks.append(task)
        task.add_done_callback(self._pending.on_task_done)

    def _on_heartbeat(self, now: float) -> None:
        self._announce()
        for connection in self._connections.values():
            self._sender.resend(connection, now)

    def _num_ready(self) -> int:
        return len(self._connections)

    def _describe_missing(self) -> list[str]:
        return [f"engine {engine_id}: {reason}" for engine_id, reason in {**self._gone, **self._refused}.items()]

    # --- sending ---

    def _only_connection(self) -> EngineConnection:
        for connection in self._connections.values():
            return connection
        raise OverloadedError("no engine has shaken hands yet")

    def _call_engine(self, connection: EngineConnection, method: str, args: Sequence[Any]) -> "asyncio.Future[Any]":
        def send(call_id: int) -> None:
            self._sender.send(connection, UtilityRequest(self.client_id, 0, call_id, method, list(args)))

        return self._utility_calls.ask(connection.engine_id, method, send)

    # --- receiving: what the output task does ---

    def _on_inbox(self) -> None:
        for arrival in self._inbox.drain():
            if isinstance(arrival, list):
                self._on_output_frames(arrival)
            elif isinstance(arrival, Handshake):
                for early in self._on_request_frames(arrival.frames):
                    self._on_output_frames(early)
            else:
                self._on_gone(arrival.engine_id, arrival.reason)
        if len(self._pending.outputs) >= MAX_QUEUED_OUTPUTS:
            self._pause_outputs()

    def _on_output_frames(self, frames: Frames) -> None:
        outputs = self._decode_outputs(frames)
        if outputs is not None:
            self._on_outputs(outputs)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is not None:
            self._on_utility_output(outputs.engine_id, outputs.utility_output)
        if outputs.outputs and self._output_hook is not None:
            self._output_hook(self, outputs)
        if outputs.outputs:
            self._pending.outputs.put(outputs)
        if outputs.dead is not None:
            self._on_gone(outputs.engine_id, outputs.dead)

    def _on_utility_output(self, engine_id: EngineId, output: UtilityOutput) -> None:
        if output.call_id != EEP_NOTIFICATION_CALL_ID:
            if not self._utility_calls.resolve(engine_id, output):
                self._drop_counter.drop("unexpected_utility_outputs", str(engine_id))
        elif self._notification_hook is None:
            self._drop_counter.drop("unhandled_notifications", str(engine_id))
        else:
            notice = self._notification_hook(self, engine_id, output.result)
            task = asyncio.create_task(notice, name=f"client {self.client_id} notification of {engine_id}")
            self._notification_tasks.add(task)
            task.add_done_callback(self._notification_tasks.discard)
            task.add_done_callback(log_failure)

    def _on_connection_opened(self, connection: EngineConnection) -> None:
        _log.info(
            "engine %s is ready on %s (%s)",
            connection.engine_id,
            connection.ready.node or "this node",
            connection.ready.device,
        )
        self._pending.engines_changed.set()

    def _on_connection_closed(self, connection: EngineConnection, reason: str, *, restarted: bool) -> None:
        """End the client's line: with its one engine gone, nothing more will come."""
        self._pending.end(reason, connection.engine_id)

    def _on_unknown_engine_died(self, engine_id: EngineId, reason: str) -> None:
        """End the client's line here too: last words may overtake the handshake of its one engine."""
        self._pending.end(reason, engine_id)

    def _on_refused(self) -> None:
        self._pending.engines_changed.set()

    def _pause_outputs(self) -> None:
        """Stop reading outputs that nobody takes: the sockets fill, and the engines merge in their output queues."""
        if self._output_receiver is not None:
            self._resources.stop_receiving(self._output_receiver)
            self._output_receiver = None
            self._counts["output_pauses"] += 1

    def _resume_outputs(self) -> None:
        if not self._resources.closed and self._request_receiver is not None:
            self._output_receiver = self._resources.receive(self._resources.outputs, self._inbox.put)
