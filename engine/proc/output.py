"""The output thread: numbered frames to every client, and no step ever waits for one of them."""

import logging
import math
import threading
import time
from collections.abc import Mapping

import zmq

from engine.proc.client_output_queue import ClientOutputQueue
from engine.proc.heartbeat import Heartbeat
from engine.proc.mailbox import Mailbox
from engine.proc.shared import SharedState
from engine.proc.slow_client_detector import SlowClientDetector, Verdict
from engine.wire.codec import FrameEncoder
from engine.wire.endpoints import WireSecurity
from engine.wire.errors import AddressError
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import (
    EEP_NOTIFICATION_CALL_ID,
    EEPNotification,
    EngineCoreOutput,
    EngineCoreOutputs,
    UtilityOutput,
)
from engine.wire.sockets import SendOutcome, connect, make_socket
from engine.wire.tracked import TrackedSends

OUTPUT_HIGH_WATER_MARK = 1000
"""Frames under way to one client; behind them its output queue merges."""

CLIENT_STALL_S = 5.0
"""A client that takes nothing from a non-empty output queue for this long gets no more compute until it takes again."""

CLIENT_DEAD_S = 30.0
"""A client that takes nothing from a non-empty output queue for this long loses its sequences."""

_LINGER_MS = 1000
_SWEEP_S = 0.2  # how often tensors under way are looked at while nothing is sent

log = logging.getLogger(__name__)


class _OutputChannel:
    """One client's PUSH socket and its output queue. is_blocked: the pipe is full; the poll tells when it has room."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", output_queue: ClientOutputQueue, slow_client_detector: SlowClientDetector
    ) -> None:
        self.socket = socket
        self.output_queue = output_queue
        self.slow_client_detector = slow_client_detector
        self.heartbeat = Heartbeat(time.monotonic())
        self.is_blocked = False

    def wait_s(self, now: float) -> float:
        """Return the seconds until time alone makes something happen here."""
        return self.slow_client_detector.wait_s(now) if self.is_blocked else self.heartbeat.wait_s(now)


class OutputThread:
    """Owns the PUSH sockets. Every public method posts to the thread and returns at once, except ``finish``."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        engine_id: EngineId,
        shared: SharedState,
        client_stall_s: float = CLIENT_STALL_S,
        client_dead_s: float = CLIENT_DEAD_S,
        security: WireSecurity | None = None,
    ) -> None:
        self._context = context
        self._engine_id = engine_id
        self._shared = shared
        self._security = security
        self._client_stall_s = client_stall_s
        self._client_dead_s = client_dead_s
        self._mailbox = Mailbox()
        self._encoder = FrameEncoder()
        self._tracked = TrackedSends()
        self._channels: dict[ClientId, _OutputChannel] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._mailbox.fd, zmq.POLLIN)
        self._flush_deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-output", daemon=True)

    def statistics(self) -> dict[str, int]:
        """Return messages of which ZeroMQ still reads a tensor. Approximate: read from outside."""
        return {"pending_messages": len(self._tracked)}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def open(self, client_id: ClientId, endpoint: str) -> None:
        """Connect to a client; outputs put afterwards reach it."""
        self._mailbox.post(self._open, client_id, endpoint)

    def close(self, client_id: ClientId) -> None:
        """Drop a client that has gone and what it was not sent."""
        self._mailbox.post(self._close, client_id)

    def put(self, outputs: Mapping[ClientId, list[EngineCoreOutput]], report_seq: int) -> None:
        """Send one step's outputs; those of clients that are not open are dropped."""
        self._mailbox.post(self._put, outputs, report_seq)

    def put_utility(self, client_id: ClientId, output: UtilityOutput, report_seq: int) -> None:
        """Send the answer of a utility call."""
        self._mailbox.post(self._put_utility, client_id, output, report_seq)

    def put_notice(self, notice: EEPNotification, report_seq: int) -> None:
        """Tell every client of an elastic change."""
        self._mailbox.post(self._put_notice, UtilityOutput(EEP_NOTIFICATION_CALL_ID, notice.value), report_seq)

    def put_last_words(self, reason: str) -> None:
        """Tell every client that the engine died."""
        self._mailbox.post(self._put_last_words, reason)

    def finish(self, flush_s: float) -> None:
        """Flush for at most ``flush_s`` seconds, close every socket and end the thread."""
        self._mailbox.post(self._finish, time.monotonic() + flush_s)
        self._thread.join()
        self._mailbox.close()

    # --- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_flushed():
                events = dict(self._poller.poll(self._timeout_ms()))
                self._mailbox.run_posted()
                self._tracked.sweep()
                for channel in self._channels.values():
                    if not channel.is_blocked or channel.socket in events:
                        self._beat(channel)
                        self._flush(channel)
                    self._judge(channel)
        except Exception as error:
            log.exception("the output thread failed")
            self._shared.fail(f"the output thread failed: {error}")
        finally:
            for client_id in list(self._channels):
                self._close(client_id, linger_ms=_LINGER_MS)

    def _is_flushed(self) -> bool:
        if self._flush_deadline is None:
            return False
        empty = not any(channel.output_queue.has_frame for channel in self._channels.values())
        return empty or time.monotonic() >= self._flush_deadline

    def _timeout_ms(self) -> int | None:
        now = time.monotonic()
        if self._flush_deadline is not None:
            return max(0, math.ceil((self._flush_deadline - now) * 1000))
        wait_s = min((channel.wait_s(now) for channel in self._channels.values()), default=math.inf)
        if self._tracked:
            wait_s = min(wait_s, _SWEEP_S)
        return None if wait_s == math.inf else math.ceil(wait_s * 1000)

    def _open(self, client_id: ClientId, endpoint: str) -> None:
        socket = make_socket(self._context, zmq.PUSH, high_water_mark=OUTPUT_HIGH_WATER_MARK, security=self._security)
        try:
            connect(socket, endpoint)
        except AddressError as error:
            log.warning("client %s gets no outputs: %s", client_id, error)
            socket.close()
            return
        slow_client_detector = SlowClientDetector(self._client_stall_s, self._client_dead_s)
        self._channels[client_id] = _OutputChannel(
            socket, ClientOutputQueue(self._engine_id, client_id), slow_client_detector
        )

    def _close(self, client_id: ClientId, linger_ms: int = 0) -> None:
        channel = self._channels.pop(client_id, None)
        if channel is not None:
            self._end_stall(channel)
            self._unblock(channel)
            channel.socket.close(linger=linger_ms)

    def _put(self, outputs: Mapping[ClientId, list[EngineCoreOutput]], report_seq: int) -> None:
        for client_id, client_outputs in outputs.items():
            channel = self._channels.get(client_id)
            if channel is not None:
                channel.output_queue.add(client_outputs, report_seq)

    def _put_utility(self, client_id: ClientId, output: UtilityOutput, report_seq: int) -> None:
        channel = self._channels.get(client_id)
        if channel is not None:
            channel.output_queue.add_utility(output, report_seq)

    def _put_notice(self, output: UtilityOutput, report_seq: int) -> None:
        for channel in self._channels.values():
            channel.output_queue.add_utility(output, report_seq)

    def _put_last_words(self, reason: str) -> None:
        for channel in self._channels.values():
            channel.output_queue.add_last_words(reason)

    def _finish(self, deadline: float) -> None:
        self._flush_deadline = deadline

    def _flush(self, channel: _OutputChannel) -> None:
        """Send until the queue is empty or the pipe is full; a refused frame stays and merges with what follows."""
        while channel.output_queue.has_frame:
            message = channel.output_queue.peek(self._shared.applied(channel.output_queue.client_id))
            frames = self._encoder.encode(message)
            if self._tracked.send_nowait(channel.socket, frames) is not SendOutcome.ACCEPTED:
                self._block(channel)
                return
            channel.output_queue.sent()
            channel.heartbeat.on_sent(time.monotonic(), is_empty=_is_empty(message))
            self._end_stall(channel)
        self._unblock(channel)

    def _beat(self, channel: _OutputChannel) -> None:
        if channel.heartbeat.wait_s(time.monotonic()) <= 0 and not channel.output_queue.has_frame:
            channel.output_queue.beat()

    def _block(self, channel: _OutputChannel) -> None:
        """Leave a full pipe alone until the poll says that it has room again."""
        channel.slow_client_detector.on_refused(time.monotonic())
        if not channel.is_blocked:
            channel.is_blocked = True
            self._poller.register(channel.socket, zmq.POLLOUT)

    def _unblock(self, channel: _OutputChannel) -> None:
        if channel.is_blocked:
            channel.is_blocked = False
            self._poller.unregister(channel.socket)

    def _end_stall(self, channel: _OutputChannel) -> None:
        if channel.slow_client_detector.on_taken():
            self._shared.set_stalled(channel.output_queue.client_id, is_stalled=False)

    def _judge(self, channel: _OutputChannel) -> None:
        client_id = channel.output_queue.client_id
        verdict = channel.slow_client_detector.judge(time.monotonic())
        if verdict is Verdict.STALLED:
            log.warning("client %s takes nothing; it gets no compute until it does", client_id)
            self._shared.set_stalled(client_id, is_stalled=True)
        elif verdict is Verdict.DEAD:
            log.warning("client %s took nothing for %.0f s; freeing its sequences", client_id, self._client_dead_s)
            channel.output_queue.clear()
            self._shared.free_client(client_id)


def _is_empty(message: EngineCoreOutputs) -> bool:
    return not message.outputs and message.utility_output is None
