"""The output thread of an engine process: numbers and sends frames to every client, so that no step waits for one.

The way of a step's outputs: the busy loop puts them into the queue of each client and wakes this thread, which takes
one frame after the other, encodes and sends it. A pipe that is full leaves the frame in the queue.
"""

import logging
import math
import threading
import time
from collections.abc import Mapping

import zmq

from engine.proc.client_output_queue import ClientOutputQueue
from engine.proc.mailbox import Mailbox
from engine.proc.pacing import Heartbeat, SlowClientDetector, Verdict
from engine.proc.shared import SharedState
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

_MAX_FRAMES_PER_TURN = 64  # of one client, before the others: the busy loop may add as fast as frames leave
_LINGER_MS = 1000
_SWEEP_S = 0.2  # how often tensors under way are looked at while nothing is sent

log = logging.getLogger(__name__)


class _OutputChannel:
    """One client's PUSH socket, the queue that feeds it, and its timers; the thread's alone, but for the queue.

    is_blocked: the pipe is full; the poll tells when it has room.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", queue: ClientOutputQueue, slow_client_detector: SlowClientDetector
    ) -> None:
        self.socket = socket
        self.queue = queue
        self.client_id = queue.client_id
        self.slow_client_detector = slow_client_detector
        self.heartbeat = Heartbeat(time.monotonic())
        self.is_blocked = False

    def wait_s(self, now: float) -> float:
        """Return the seconds until time alone makes something happen here."""
        return self.slow_client_detector.wait_s(now) if self.is_blocked else self.heartbeat.wait_s(now)


class OutputThread:
    """Owns the PUSH sockets. Public methods add to the clients' queues or post to the thread, and return at once.

    Only ``finish`` waits. The lock guards the queues and is held for the time of adding or taking, never while a frame
    is encoded or sent.
    """

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
        self._lock = threading.Lock()
        self._queues: dict[
            ClientId, ClientOutputQueue
        ] = {}  # of the clients that are open; guarded, as each of them is
        self._mailbox = Mailbox()
        self._encoder = FrameEncoder()
        self._tracked = TrackedSends()
        self._channels: dict[ClientId, _OutputChannel] = {}  # the thread's alone
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
        queue = ClientOutputQueue(self._engine_id, client_id)
        with self._lock:  # at once, and not on the thread: outputs may be put before that gets to connect
            self._queues[client_id] = queue
        self._mailbox.post(self._open, queue, endpoint)

    def close(self, client_id: ClientId) -> None:
        """Drop a client that has gone and what it was not sent."""
        with self._lock:
            self._queues.pop(client_id, None)
        self._mailbox.post(self._close, client_id)

    def put(self, outputs: Mapping[ClientId, list[EngineCoreOutput]], report_seq: int) -> None:
        """Send one step's outputs; those of clients that are not open are dropped.

        report_seq: number of the first report that reflects the step.
        """
        if not outputs:
            return  # as of a step that computes a part of a long prompt: nothing to wake the thread for
        with self._lock:
            for client_id, client_outputs in outputs.items():
                queue = self._queues.get(client_id)
                if queue is not None:
                    queue.add(client_outputs, report_seq)
        self._mailbox.wake()

    def put_utility(self, client_id: ClientId, output: UtilityOutput, report_seq: int) -> None:
        """Send the answer of a utility call."""
        with self._lock:
            queue = self._queues.get(client_id)
            if queue is not None:
                queue.add_utility(output, report_seq)
        self._mailbox.wake()

    def put_notice(self, notice: EEPNotification, report_seq: int) -> None:
        """Notify every client of an elastic change."""
        output = UtilityOutput(EEP_NOTIFICATION_CALL_ID, notice.value)
        with self._lock:
            for queue in self._queues.values():
                queue.add_utility(output, report_seq)
        self._mailbox.wake()

    def put_last_words(self, reason: str) -> None:
        """Send every client the reason of the engine's death, behind all that waits."""
        with self._lock:
            for queue in self._queues.values():
                queue.add_last_words(reason)
        self._mailbox.wake()

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
                if self._mailbox.fd in events:
                    self._mailbox.run_posted()
                self._tracked.sweep()
                for channel in self._channels.values():
                    if not channel.is_blocked or channel.socket in events:
                        self._flush(channel)
                    self._judge(channel)  # also when nothing came: time alone makes a client slow
        except Exception as error:
            log.exception("the output thread failed")
            self._shared.fail(f"the output thread failed: {error}")
        finally:
            for client_id in list(self._channels):
                self._close(client_id, linger_ms=_LINGER_MS)  # what a pipe has accepted is not with the client yet

    def _is_flushed(self) -> bool:
        if self._flush_deadline is None:
            return False
        empty = not any(channel.queue.has_frame for channel in self._channels.values())
        return empty or time.monotonic() >= self._flush_deadline

    def _timeout_ms(self) -> int | None:
        now = time.monotonic()
        if self._flush_deadline is not None:  # nothing more will be put, so only room in a pipe or the deadline matters
            return max(0, math.ceil((self._flush_deadline - now) * 1000))
        wait_s = min((channel.wait_s(now) for channel in self._channels.values()), default=math.inf)
        if self._tracked:
            wait_s = min(wait_s, _SWEEP_S)
        return None if wait_s == math.inf else math.ceil(wait_s * 1000)

    def _open(self, queue: ClientOutputQueue, endpoint: str) -> None:
        socket = make_socket(self._context, zmq.PUSH, high_water_mark=OUTPUT_HIGH_WATER_MARK, security=self._security)
        try:
            connect(socket, endpoint)
        except AddressError as error:
            log.warning("client %s gets no outputs: %s", queue.client_id, error)
            socket.close()
            self._drop_queue(queue)
            return
        slow_client_detector = SlowClientDetector(self._client_stall_s, self._client_dead_s)
        self._channels[queue.client_id] = _OutputChannel(socket, queue, slow_client_detector)

    def _drop_queue(self, queue: ClientOutputQueue) -> None:
        """Take nothing more for a client that cannot be reached; it may have been opened anew meanwhile."""
        with self._lock:
            if self._queues.get(queue.client_id) is queue:
                del self._queues[queue.client_id]

    def _close(self, client_id: ClientId, linger_ms: int = 0) -> None:
        channel = self._channels.pop(client_id, None)
        if channel is not None:
            self._end_stall(channel)  # every stall is followed by its end, else its sequences stand aside for ever
            self._unblock(channel)
            channel.socket.close(linger=linger_ms)

    def _finish(self, deadline: float) -> None:
        self._flush_deadline = deadline

    def _flush(self, channel: _OutputChannel) -> None:
        """Send until the queue is empty or the pipe is full; a refused frame goes back and merges with what follows."""
        for _ in range(_MAX_FRAMES_PER_TURN):
            frame = self._take_frame(channel)
            if frame is None:
                break
            encoded = self._encoder.encode(frame)
            if self._tracked.send_nowait(channel.socket, encoded) is not SendOutcome.ACCEPTED:
                with self._lock:
                    channel.queue.put_back(frame)
                self._block(channel)
                return
            channel.heartbeat.on_sent(time.monotonic(), is_empty=_is_empty(frame))
            self._end_stall(channel)
        else:
            self._mailbox.wake()  # there may be more, when the other clients have had their turn
        self._unblock(channel)

    def _take_frame(self, channel: _OutputChannel) -> EngineCoreOutputs | None:
        is_heartbeat_due = channel.heartbeat.wait_s(time.monotonic()) <= 0
        with self._lock:
            # ``applied`` is read under the lock: no output can come between that answers a message beyond it.
            applied = self._shared.applied(channel.client_id)
            return channel.queue.take(applied, even_if_empty=is_heartbeat_due)

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
            self._shared.set_stalled(channel.client_id, is_stalled=False)

    def _judge(self, channel: _OutputChannel) -> None:
        client_id = channel.client_id
        verdict = channel.slow_client_detector.judge(time.monotonic())
        if verdict is Verdict.STALLED:
            log.warning("client %s takes nothing; it gets no compute until it does", client_id)
            self._shared.set_stalled(client_id, is_stalled=True)
        elif verdict is Verdict.DEAD:
            log.warning("client %s took nothing for %.0f s; freeing its sequences", client_id, self._client_dead_s)
            # The connection stays: a client that was merely slow goes on with it, and sees the gap.
            with self._lock:
                channel.queue.clear()
            self._shared.free_client(client_id)


def _is_empty(frame: EngineCoreOutputs) -> bool:
    return not frame.outputs and frame.utility_output is None
