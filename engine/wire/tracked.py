"""Sends that share memory with ZeroMQ: large tensor frames go without a copy, and are held until they are sent."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from engine.wire.sockets import SendOutcome, send_nowait
from engine.wire.tensors import Buffer

COPY_BELOW_BYTES = 64 * 1024
"""Smaller frames are copied: sharing one costs two messages between threads, as much as copying this much."""

MAX_PENDING_BYTES = 1024 * 1024 * 1024

_Pending = tuple[int, list["zmq.MessageTracker"]]


class TrackedSends:
    """Sends messages on the sockets of one thread and remembers those of which ZeroMQ still reads a frame.

    A message is pending until the trackers of *all* its frames are done: one that only waited for the last would let go
    of the others while they are read. The table is bounded: once it is full, frames are copied like small ones.
    """

    def __init__(self, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pending: deque[_Pending] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Tell whether no more memory may be shared now."""
        return self._num_bytes >= self._max_bytes

    def statistics(self) -> dict[str, int]:
        """Return how many messages, and bytes of theirs, ZeroMQ has not let go of."""
        self.sweep()
        return {"pending_messages": len(self._pending), "pending_bytes": self._num_bytes}

    def send_nowait(self, socket: "zmq.Socket[bytes]", frames: Sequence[Buffer]) -> SendOutcome:
        """Send all frames as one message without waiting; see ``sockets.send_nowait``."""
        if all(len(frame) < COPY_BELOW_BYTES for frame in frames):
            return send_nowait(socket, frames)
        self.sweep()
        if self.is_full:
            return send_nowait(socket, frames)
        trackers: list[zmq.MessageTracker] = []
        outcome = send_nowait(socket, frames, lambda frame, flags: _send_shared(socket, frame, flags, trackers))
        if trackers:  # also of a message that was refused half-way: ZeroMQ may read its first frames
            num_bytes = sum(len(frame) for frame in frames)
            self._pending.append((num_bytes, trackers))
            self._num_bytes += num_bytes
        return outcome

    def sweep(self) -> None:
        """Let go of what is done; cheap when nothing is pending. Call it now and then where nothing is sent."""
        for _ in range(len(self._pending)):
            num_bytes, trackers = self._pending.popleft()
            if all(tracker.done for tracker in trackers):
                self._num_bytes -= num_bytes
            else:
                self._pending.append((num_bytes, trackers))


def _send_shared(socket: "zmq.Socket[bytes]", frame: Buffer, flags: int, trackers: list[Any]) -> None:
    """Send one frame, a small one as a copy."""
    if len(frame) < COPY_BELOW_BYTES:
        socket.send(frame, flags)
    else:
        trackers.append(socket.send(frame, flags, copy=False, track=True))
