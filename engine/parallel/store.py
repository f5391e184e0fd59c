"""The rendezvous store of a lockstep group: keys with the addresses of its members, served by one of them.

Instead of torch's ``TCPStore``, which asks the name server for the name of each peer before it answers (5 s when the
name server does not reply, seen in one of ten rendezvous), listens on all interfaces, and waits for a key as long as
the group's collectives may take, which is for ever.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as _distributed
import zmq

from engine.wire.endpoints import advertised, tcp_endpoint
from engine.wire.errors import EngineError
from engine.wire.sockets import bind, connect, make_socket, receive_nowait, send_nowait

dist: Any = _distributed  # half of what is used here is not declared as exported

MAX_KEYS = 10_000
"""Keys kept, and requests that wait for one; then the oldest goes. A rendezvous of N members leaves about 4 x N."""

MAX_VALUE_BYTES = 64 * 1024
_MAX_DIGITS = 18

_POLL_MS = 20
_SET, _GET, _ADD = b"set", b"get", b"add"


class StoreError(EngineError):
    """The key was not set in time, the store cannot be reached, or this rank was ordered to leave."""


class KeyTable:
    """The stored keys, and the peers that wait for one. Pure: a request in, replies out."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: deque[tuple[str, bytes]] = deque(maxlen=MAX_KEYS)

    def __len__(self) -> int:
        return len(self._values)

    def handle(self, peer: bytes, request: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """Return (peer, reply) of all peers that get one now; a malformed request gets none."""
        if len(request) != 3 or max(map(len, request)) > MAX_VALUE_BYTES:
            return []
        operation, name, value = request
        key = name.decode(errors="replace")
        if operation == _SET:
            self._values[key] = value
            return [(peer, b""), *self._release(key)]
        if operation == _ADD and _is_number(value) and _is_number(self._values.get(key, b"0")):
            self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + int(value))
            return [(peer, self._values[key]), *self._release(key)]
        if operation == _GET:
            self._waiting.append((key, peer))
            return self._release(key)
        return []

    def _release(self, key: str) -> list[tuple[bytes, bytes]]:
        """Return the replies to all peers that wait for a key, if it is set."""
        while len(self._values) > MAX_KEYS:
            del self._values[next(iter(self._values))]
        if key not in self._values:
            return []
        released = [(peer, self._values[key]) for wanted, peer in self._waiting if wanted == key]
        self._waiting = deque((item for item in self._waiting if item[0] != key), maxlen=MAX_KEYS)
        return released


def _is_number(value: bytes) -> bool:
    return value.isdigit() and len(value) <= _MAX_DIGITS


class StoreServer:
    """Serves a store in a thread of its own until ``close``. endpoint: for peers, on a port the system chose.

    Raises:
        AddressError: the host is not this one's.
    """

    def __init__(self, host: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = make_socket(self._context, zmq.ROUTER)
        try:
            self.endpoint = advertised(bind(self._socket, tcp_endpoint(host)), host)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._serve, name="shoal-group-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; idempotent. Peers that wait for a key wait until their own time is over."""
        self._context.term()  # the thread is woken by it, and closes its socket
        self._thread.join()

    def _serve(self) -> None:
        keys = KeyTable()
        try:
            while True:
                self._socket.poll()
                with contextlib.suppress(zmq.Again):
                    identity, *request = receive_nowait(self._socket)
                    for peer, reply in keys.handle(bytes(identity), [bytes(frame) for frame in request]):
                        send_nowait(self._socket, [peer, reply])  # a peer that is gone needs no reply
        except zmq.ContextTerminated:
            self._socket.close(linger=0)


class GroupStore(dist.Store):  # type: ignore[misc]  # see ``dist``
    """One member's client of a store. Its methods are called by torch's process groups, from one thread at a time."""

    def __init__(self, endpoint: str, timeout_s: float, must_leave: Callable[[], bool]) -> None:
        """endpoint: of the server. timeout_s: for everything until ``close``, whatever torch asks for.

        must_leave: polled every 20 ms while a reply is waited for.
        """
        super().__init__()
        self._deadline = time.monotonic() + timeout_s
        self._must_leave = must_leave
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = make_socket(self._context, zmq.DEALER)
        connect(self._socket, endpoint)

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._request(_SET, key, bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value; waits until it is set.

        Raises:
            StoreError: it was not set in time, or this rank was ordered to leave.
        """
        return self._request(_GET, key)

    def wait(self, keys: Sequence[str], _timeout: Any = None) -> None:
        """Wait until all keys are set.

        Raises:
            StoreError: see ``get``.
        """
        for key in keys:
            self._request(_GET, key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, at first 0, and return the sum."""
        return int(self._request(_ADD, key, b"%d" % amount))

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._context.destroy(linger=0)

    def _request(self, operation: bytes, key: str, value: bytes = b"") -> bytes:
        if self._socket.closed:
            raise StoreError(f"the store is closed: {operation.decode()} {key}")
        self._socket.send_multipart([operation, key.encode(), value])
        while not self._socket.poll(_POLL_MS):
            if self._must_leave():
                raise StoreError("ordered to leave a rendezvous")
            if time.monotonic() > self._deadline:
                raise StoreError(f"no answer to {operation.decode()} {key} in time")
        return self._socket.recv()
