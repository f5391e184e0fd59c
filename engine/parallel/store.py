"""Where the members of an epoch leave their addresses for each other: a small store of keys, served by one of them.

Instead of torch's ``TCPStore``, which asks the name server who each peer is before it answers it (5 s when that one
does not reply, seen in one of ten meetings), listens on all interfaces, and waits for a key as long as the group's
collectives may take, which is for ever.
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

dist: Any = _distributed  # the library exports half of it without saying so

MAX_KEYS = 10_000
"""Keys kept, and questions that wait for one; then the oldest goes. A meeting of N members leaves about 4 x N."""

MAX_VALUE_BYTES = 64 * 1024
_MAX_DIGITS = 18

_POLL_MS = 20
_SET, _GET, _ADD = b"set", b"get", b"add"


class StoreError(EngineError):
    """Nobody set the key in time, the store cannot be reached, or this rank was told to leave."""


class Keys:
    """What is stored, and who waits for what. Pure: a question in, answers out."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: deque[tuple[str, bytes]] = deque(maxlen=MAX_KEYS)

    def __len__(self) -> int:
        return len(self._values)

    def ask(self, peer: bytes, question: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """Return (peer, answer) of everybody who gets one now; a question that makes no sense gets none."""
        if len(question) != 3 or max(map(len, question)) > MAX_VALUE_BYTES:
            return []
        operation, name, value = question
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
        """Stop; idempotent. Who waits for a key waits on."""
        self._context.term()  # the thread is woken by it, and closes its socket
        self._thread.join()

    def _serve(self) -> None:
        keys = Keys()
        try:
            while True:
                self._socket.poll()
                with contextlib.suppress(zmq.Again):
                    identity, *question = receive_nowait(self._socket)
                    for peer, answer in keys.ask(bytes(identity), [bytes(frame) for frame in question]):
                        send_nowait(self._socket, [peer, answer])  # who is gone needs no answer
        except zmq.ContextTerminated:
            self._socket.close(linger=0)


class GroupStore(dist.Store):  # type: ignore[misc]  # see ``dist``
    """One member's way to a store. Its methods are called by torch's process groups, from one thread at a time."""

    def __init__(self, endpoint: str, timeout_s: float, must_leave: Callable[[], bool]) -> None:
        """endpoint: of the server. timeout_s: for everything until ``close``, whatever torch asks for.

        must_leave: asked every 20 ms while an answer is waited for.
        """
        super().__init__()
        self._deadline = time.monotonic() + timeout_s
        self._must_leave = must_leave
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = make_socket(self._context, zmq.DEALER)
        connect(self._socket, endpoint)

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._ask(_SET, key, bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value; waits until somebody sets it.

        Raises:
            StoreError: nobody did in time, or this rank was told to leave.
        """
        return self._ask(_GET, key)

    def wait(self, keys: Sequence[str], _timeout: Any = None) -> None:
        """Wait until all keys are set.

        Raises:
            StoreError: see ``get``.
        """
        for key in keys:
            self._ask(_GET, key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, at first 0, and return the sum."""
        return int(self._ask(_ADD, key, b"%d" % amount))

    def close(self) -> None:
        """Let go of the connection; idempotent."""
        self._context.destroy(linger=0)

    def _ask(self, operation: bytes, key: str, value: bytes = b"") -> bytes:
        if self._socket.closed:
            raise StoreError(f"the store is closed: {operation.decode()} {key}")
        self._socket.send_multipart([operation, key.encode(), value])
        while not self._socket.poll(_POLL_MS):
            if self._must_leave():
                raise StoreError("told to leave a meeting")
            if time.monotonic() > self._deadline:
                raise StoreError(f"no answer to {operation.decode()} {key} in time")
        return self._socket.recv()
