"""ZeroMQ sockets, every one made here with its options set; sends that do not wait, and the asyncio receiver.

Rules kept in one place: linger 0, bounded high-water marks, bounded message size, ROUTER with MANDATORY and HANDOVER,
bind port 0 and publish what the system gave, CURVE where the channel has keys.
"""

import asyncio
import contextlib
import errno
import ipaddress
import socket as system_socket
from collections.abc import Callable, Sequence
from enum import Enum

import zmq

from engine.wire.curve import secure_member, secure_server
from engine.wire.endpoints import WireSecurity
from engine.wire.errors import AddressError
from engine.wire.tensors import Buffer, Frames

HIGH_WATER_MARK = 10_000
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_INBOUND_BYTES: dict[int, int] = {zmq.ROUTER: 16 * 1024 * 1024, zmq.XPUB: 4096}
"""Where only handshakes, calls and subscriptions come in; ZeroMQ hangs up on a peer that announces more."""


_BINDING_TYPES = frozenset({zmq.ROUTER, zmq.PULL, zmq.XPUB})
"""On every channel these bind and their counterparts connect."""

_HINTS = {
    errno.EADDRNOTAVAIL: " (--interface names what to bind to)",
    errno.ENODEV: " (--interface names what to bind to)",
    errno.EADDRINUSE: " (--port-range)",
}

_POLLIN = int(zmq.POLLIN)  # a plain int: masking with the enum costs as much as the call
_NOBLOCK = int(zmq.NOBLOCK)  # plain ints too: ``send_multipart`` takes twice the time for its enums
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)
_FRAME_BYTES = 256  # what an empty frame costs its receiver


class SendOutcome(Enum):
    """What became of a non-blocking send. Only ``applied`` proves delivery of an accepted one."""

    ACCEPTED = "accepted"
    NOT_CONNECTED = "not connected"
    FULL = "pipe full"


def make_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    socket_type: int,
    *,
    identity: bytes | None = None,
    topics: Sequence[bytes] = (),
    high_water_mark: int = HIGH_WATER_MARK,
    security: WireSecurity | None = None,
) -> "zmq.Socket[bytes]":
    """Make a socket with all options of its kind set, not yet bound or connected.

    identity: routing id of a DEALER. topics: subscriptions of an XSUB. security: keys of a channel with CURVE; a
    process that binds such channels also keeps a ``ZapAuthenticator``.
    """
    socket = context.socket(socket_type)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, high_water_mark)
    socket.set(zmq.RCVHWM, high_water_mark)
    socket.set(zmq.MAXMSGSIZE, MAX_INBOUND_BYTES.get(socket_type, MAX_MESSAGE_BYTES))
    socket.set(zmq.TCP_KEEPALIVE, 1)
    if socket_type == zmq.ROUTER:  # a send to nobody is an error, and a restarted peer takes its routing id over
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)
    if security is not None:
        (secure_server if socket_type in _BINDING_TYPES else secure_member)(socket, security)
    if identity is not None:
        socket.set(zmq.IDENTITY, identity)
    for topic in topics:
        socket.send(b"\x01" + topic)
    return socket


def bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """Bind and return the endpoint the system gave (a real port for port 0 or a range).

    Raises:
        AddressError: with the endpoint and the system's reason.
    """
    _allow_ipv6(socket, endpoint)
    *taken, last = _choices(endpoint)
    for choice in taken:
        with contextlib.suppress(zmq.ZMQError):
            socket.bind(choice)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        socket.bind(last)
    except zmq.ZMQError as error:
        hint = _HINTS.get(error.errno or 0, "") if last.startswith("tcp://") else ""
        raise AddressError(f"cannot bind {endpoint}{hint}: {zmq.strerror(error.errno or 0)}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _choices(endpoint: str) -> list[str]:
    """Return the endpoints to try, one per port of a range ``tcp://host:LOW-HIGH``."""
    place, _, ports = endpoint.rpartition(":")
    low, _, high = ports.partition("-")
    if endpoint.startswith("tcp://") and low.isdecimal() and high.isdecimal():
        return [f"{place}:{port}" for port in range(int(low), int(high) + 1)]
    return [endpoint]


def connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Connect; the peer need not be there yet.

    Raises:
        AddressError: the endpoint is malformed.
    """
    _allow_ipv6(socket, endpoint)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise AddressError(f"cannot connect to {endpoint}: {zmq.strerror(error.errno or 0)}") from error


def _allow_ipv6(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    # An IPv4 address must stay one: with IPv6 allowed, ZeroMQ would publish it as [::ffff:a.b.c.d]. Of a network
    # interface it would take the link-local address.
    host = endpoint.partition("://")[2].rpartition(":")[0]
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        socket.set(zmq.IPV6, int(host not in {name for _, name in system_socket.if_nameindex()}))
    else:
        socket.set(zmq.IPV6, 0)


def send_nowait(
    socket: "zmq.Socket[bytes]",
    frames: Sequence[Buffer],
    send: Callable[[Buffer, int], object] | None = None,
) -> SendOutcome:
    """Send all frames as one message without waiting.

    send: sends one frame with these flags; None copies it.
    """
    send = send or socket.send
    try:
        for frame in frames[:-1]:
            send(frame, _MORE)
        send(frames[-1], _NOBLOCK)
    except zmq.Again:
        return SendOutcome.FULL
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return SendOutcome.NOT_CONNECTED
        raise
    return SendOutcome.ACCEPTED


def receive_nowait(socket: "zmq.Socket[bytes]") -> Frames:
    """Return the next message: its first frame copied, those behind it (tensors) as views of ZeroMQ's own memory.

    A message larger than ``MAX_MESSAGE_BYTES`` in all loses its last frames, so that no decoder takes it.

    Raises:
        zmq.Again: there is none.
    """
    frames: Frames = [socket.recv(_NOBLOCK)]
    room = MAX_MESSAGE_BYTES - len(frames[0])
    while socket.getsockopt(_RCVMORE):
        frame = socket.recv(_NOBLOCK, copy=False).buffer
        room -= len(frame) + _FRAME_BYTES
        if room >= 0:
            frames.append(frame)
    return frames


class AsyncReceiver:
    """Hands every message of a plain socket to a callback on the running event loop.

    ``zmq.asyncio`` costs about 20 us more per message, so the socket's file descriptor is watched instead. That
    descriptor is edge-triggered: one edge may stand for many messages, and a send on the same socket may swallow it.
    So every way out of ``_on_ready`` has either seen the socket empty or scheduled itself, and whoever sends on the
    same socket calls ``poke`` afterwards. Asking for ``EVENTS`` costs half of receiving until ``Again`` is raised.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", on_message: Callable[[Frames], None], *, max_per_turn: int = 64
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._max_per_turn = max_per_turn
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled: asyncio.Handle | None = None
        self._closed = False
        self._loop.add_reader(self._fd, self._on_ready)
        self.poke()

    def poke(self) -> None:
        """Look for messages soon, whatever the descriptor says."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._on_scheduled)

    def close(self) -> None:
        """Stop watching; idempotent. The socket stays the caller's to close."""
        if self._closed:
            return
        self._closed = True
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.remove_reader(self._fd)

    def _on_scheduled(self) -> None:
        self._scheduled = None
        self._on_ready()

    def _on_ready(self) -> None:
        for _ in range(self._max_per_turn):
            if self._closed or not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                return
            frames = receive_nowait(self._socket)
            try:
                self._on_message(frames)
            except BaseException:
                self.poke()  # the edge is spent: without it the messages behind would wait for the next one
                raise
        self.poke()  # let the other callbacks of the loop run before the rest
