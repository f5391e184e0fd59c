"""Everything a client must give back: sockets, watchers of descriptors, tasks."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial

import zmq

from client.config import ClientConfig
from engine.wire.curve import ZapAuthenticator
from engine.wire.endpoints import advertised
from engine.wire.messages import GROUP_TOPIC, LOAD_TOPIC
from engine.wire.sockets import AsyncReceiver, bind, connect, make_socket
from engine.wire.tensors import Frames

_REPORT_HIGH_WATER_MARK = 16  # whole reports: older ones than these say nothing to a coordinator that comes back
_LEAVE_LINGER_MS = 100
_MESSAGES_PER_TURN = 4
"""What one turn receives lives until the consumer has had it: with 64 batches of 128 outputs that is more than the
CPU's cache holds, and a token costs 0.7 instead of 0.5 us."""


class ClientResources:
    """Opens the four sockets and closes whatever was opened, in whichever state the client ends.

    Holds no reference to the client, so it can be the client's finaliser: a client that is dropped, or whose
    construction fails half-way, leaves nothing behind.

    Sockets exist from construction; their receivers only from the first call inside a running loop. What arrives in
    between waits in the sockets, so an early death is not lost.
    """

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._authenticator: ZapAuthenticator | None = None
        self._receivers: list[AsyncReceiver] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._lock = threading.Lock()
        self.tasks: list[asyncio.Task[None]] = []
        self.closed = False

    def open(self, config: ClientConfig) -> None:
        """Bind and connect.

        Raises:
            AddressError: an endpoint cannot be bound or connected.
        """
        self._context = zmq.Context()
        make = partial(make_socket, self._context, security=config.security)
        self.router, self.outputs = make(zmq.ROUTER), make(zmq.PULL)
        if config.security is not None:
            self._authenticator = ZapAuthenticator(
                self._context, config.security, {"requests": self.router, "outputs": self.outputs}
            )
        self.request_endpoint = advertised(bind(self.router, config.request_bind), config.advertise_host)
        self.output_endpoint = advertised(bind(self.outputs, config.output_bind), config.advertise_host)
        self.reports = make(zmq.PUSH, high_water_mark=_REPORT_HIGH_WATER_MARK)
        connect(self.reports, config.report_endpoint)
        self.states = make(zmq.XSUB, topics=(GROUP_TOPIC, LOAD_TOPIC))
        connect(self.states, config.state_endpoint)

    @property
    def num_refused_peers(self) -> int:
        """Return how many handshakes failed for want of the deployment's key."""
        return self._authenticator.refused.total() if self._authenticator is not None else 0

    def receive(self, socket: "zmq.Socket[bytes]", on_message: Callable[[Frames], None]) -> AsyncReceiver:
        """Start to watch a socket on the running loop; ``on_message`` must not hold the client."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        receiver = AsyncReceiver(socket, on_message, max_per_turn=_MESSAGES_PER_TURN)
        self._receivers.append(receiver)
        return receiver

    def stop_receiving(self, receiver: AsyncReceiver) -> None:
        """Stop watching one socket; what arrives waits in it."""
        receiver.close()
        self._receivers.remove(receiver)

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
        if self._context is not None:
            self._context.destroy()
