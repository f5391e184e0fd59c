"""The sockets, watched descriptors and tasks of a client, which all are given back; and how it sends on its ROUTER."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import zmq

from client.config import ClientConfig
from client.engine_connection import MAX_UNAPPLIED_MESSAGES, EngineConnection
from engine.wire.curve import ZapAuthenticator
from engine.wire.endpoints import advertised
from engine.wire.messages import GROUP_TOPIC, LOAD_TOPIC, AddRequest, ChannelMessage
from engine.wire.sockets import AsyncReceiver, SendOutcome, bind, connect, make_socket
from engine.wire.tensors import Frames
from engine.wire.tracked import TrackedSends

_REPORT_HIGH_WATER_MARK = 16  # whole reports: a coordinator that comes back has no use for older ones
_LEAVE_LINGER_MS = 100
_MESSAGES_PER_TURN = 4
"""What one turn receives lives until the consumer has had it: with 64 batches of 128 outputs that is more than the
CPU's cache holds, and a token costs 0.7 instead of 0.5 us."""

OnMessage = Callable[[Frames], None]


class ClientResources:
    """Opens the four sockets of a client and closes whatever was opened, in whichever state the client ends.

    Holds no reference to the client, so it can be the client's finaliser: a client that is dropped, or whose
    construction fails half-way, leaves nothing behind.

    Sockets exist from construction; their receivers only from the first call inside a running loop. What arrives in
    between waits in the sockets, so an early death is not lost.

    tasks: those of the client, cancelled at the end.
    """

    def __init__(self, config: ClientConfig) -> None:
        """Bind and connect.

        Raises:
            AddressError: an endpoint cannot be bound or connected; nothing is left open.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ZapAuthenticator | None = None
        self._receivers: list[AsyncReceiver] = []
        self._request_receiver: AsyncReceiver | None = None
        self._output_receiver: AsyncReceiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._lock = threading.Lock()
        self.tasks: list[asyncio.Task[None]] = []
        self.closed = False
        make = partial(make_socket, self._context, security=config.security)
        try:
            self.router, self.outputs = make(zmq.ROUTER), make(zmq.PULL)
            if config.security is not None:  # before they are bound: nobody enters unasked
                bound = {"requests": self.router, "outputs": self.outputs}
                self._authenticator = ZapAuthenticator(self._context, config.security, bound)
            self.request_endpoint = advertised(bind(self.router, config.request_bind), config.advertise_host)
            self.output_endpoint = advertised(bind(self.outputs, config.output_bind), config.advertise_host)
            self.reports = make(zmq.PUSH, high_water_mark=_REPORT_HIGH_WATER_MARK)
            connect(self.reports, config.report_endpoint)
            self.states = make(zmq.XSUB, topics=(GROUP_TOPIC, LOAD_TOPIC))
            connect(self.states, config.state_endpoint)
        except BaseException:
            self._close()
            raise

    @property
    def num_refused_peers(self) -> int:
        """Return how many handshakes failed for want of the deployment's key."""
        return self._authenticator.refused.total() if self._authenticator is not None else 0

    # --- receiving: callbacks must not hold the client --------------------------------------------------------------

    def receive(self, socket: "zmq.Socket[bytes]", on_message: OnMessage) -> AsyncReceiver:
        """Start to watch a socket on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        receiver = AsyncReceiver(socket, on_message, max_per_turn=_MESSAGES_PER_TURN)
        self._receivers.append(receiver)
        return receiver

    def receive_requests(self, on_message: OnMessage) -> None:
        """Start to watch the ROUTER, on which engines shake hands."""
        self._request_receiver = self.receive(self.router, on_message)

    def poke_requests(self) -> None:
        """Look for handshakes after a send: it may have swallowed the edge of the ROUTER's descriptor."""
        if self._request_receiver is not None:
            self._request_receiver.poke()

    def receive_outputs(self, on_message: OnMessage) -> None:
        """Start to watch the PULL, or go on after ``pause_outputs``; no effect once everything is closed."""
        if self._output_receiver is None and not self.closed:
            self._output_receiver = self.receive(self.outputs, on_message)

    def pause_outputs(self) -> bool:
        """Stop reading outputs, so that the socket fills and engines are held back; False when it was so already."""
        if self._output_receiver is None:
            return False
        self._output_receiver.close()
        self._receivers.remove(self._output_receiver)
        self._output_receiver = None
        return True

    # --- the end ----------------------------------------------------------------------------------------------------

    def let_reports_linger(self) -> None:
        """Give the last report a moment to leave before its socket closes."""
        self.reports.set(zmq.LINGER, _LEAVE_LINGER_MS)

    def close(self) -> None:
        """Close everything; idempotent, from any thread.

        Garbage collection may run this in a thread that is not the loop's. A running loop then does the work itself,
        because neither its watchers nor its tasks may be touched from outside.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
        loop = self._loop
        if loop is not None and loop.is_running() and self._thread_id != threading.get_ident():
            with contextlib.suppress(RuntimeError):  # it stopped just now
                loop.call_soon_threadsafe(self._close)
                return
        self._close()

    def _close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        for task in self.tasks:
            with contextlib.suppress(RuntimeError):  # the loop is closed already and the task with it
                task.cancel()
        self._context.destroy()


class RouterSender:
    """Sends on the ROUTER; a ``Sender``.

    A send has three outcomes: accepted (only ``applied`` proves delivery), not connected, pipe full. A connection that
    refused a message is ``blocked`` until ``resend`` tries it again.

    tracked: the tensors that ZeroMQ still reads.
    """

    def __init__(self, resources: ClientResources, counts: Counter[str]) -> None:
        self.tracked = TrackedSends()
        self._resources = resources
        self._counts = counts

    def send(self, connection: EngineConnection, message: ChannelMessage) -> None:
        """See ``Sender``."""
        self._send_frames(connection, connection.stage(message))
        self._resources.poke_requests()

    def send_add(self, connection: EngineConnection, request: AddRequest) -> bool:
        """See ``Sender``.

        An engine that applies nothing for too long takes no new requests either, nor, when it carries a tensor, one
        whose engines have not read the tensors before it: their memory is held until they have.
        """
        too_many_tensors = request.prompt_embeds is not None and self.tracked.is_full
        if connection.num_unapplied >= MAX_UNAPPLIED_MESSAGES or too_many_tensors:
            connection.blocked = True
            return False
        accepted = self._send_frames(connection, connection.stage(request))
        if not accepted:
            connection.unstage()
        self._resources.poke_requests()
        return accepted

    def resend(self, connection: EngineConnection, now: float) -> None:
        """Send the unapplied tail again if it is due, and let a blocked connection be tried once more."""
        connection.blocked = False
        self.tracked.sweep()
        for frames in connection.messages_to_resend(now):
            self._counts["resent_messages"] += 1
            if not self._send_frames(connection, frames):
                break  # the rest would only leave a hole before it
        self._resources.poke_requests()

    def _send_frames(self, connection: EngineConnection, frames: Frames) -> bool:
        outcome = self.tracked.send_nowait(self._resources.router, [connection.identity, *frames])
        if outcome is SendOutcome.ACCEPTED:
            return True
        connection.blocked = True
        self._counts[f"sends_{outcome.name.lower()}"] += 1
        return False
