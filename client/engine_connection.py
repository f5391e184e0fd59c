"""One engine as one client reaches it: the numbered messages to it, and what is in flight at its other end. Pure."""

from collections import deque
from typing import Protocol

from engine.wire.codec import FrameEncoder
from engine.wire.messages import AddRequest, ChannelMessage, EngineReady
from engine.wire.tensors import Buffer
from lb.routing.ledger import EngineLedger

RESEND_AFTER_S = 1.0

MAX_UNAPPLIED_MESSAGES = 10_000
"""An engine that applies nothing for so long gets no new requests."""


class EngineConnection:
    """Numbers the messages to one EngineId and keeps those it has not applied yet.

    A live TCP connection may lose messages when it is reset, and only ``applied`` proves delivery. So the unapplied
    tail is kept as encoded frames and sent again, in order, when nothing moved for a second; the engine drops what it
    has already.

    ready: its handshake. ledger: what this client has in flight on it.
    leaving: it finishes what it has and takes nothing new. dismissed: it was asked to end, which nobody takes back.
    cordoned: the operator wants of its rank that it takes nothing new.
    suspect: the coordinator sees no sign of progress. blocked: its pipe refused a message a moment ago.
    """

    __slots__ = (
        "_encoder",
        "_next_seq",
        "_out_seq",
        "_progressed",
        "_progressed_at",
        "_tail",
        "applied",
        "blocked",
        "cordoned",
        "dismissed",
        "engine_id",
        "identity",
        "leaving",
        "ledger",
        "ready",
        "suspect",
    )

    def __init__(self, ready: EngineReady, now: float) -> None:
        self.engine_id = ready.engine_id
        self.identity = ready.engine_id.to_identity()
        self.ready = ready
        self.ledger = EngineLedger(ready.engine_id)
        self.leaving = False
        self.dismissed = False
        self.cordoned = False
        self.suspect = False
        self.blocked = False
        self.applied = 0
        self._encoder = FrameEncoder()
        self._next_seq = 1
        self._tail: deque[tuple[int, list[Buffer]]] = deque()
        self._progressed = False
        self._progressed_at = now
        self._out_seq = 0

    @property
    def is_open(self) -> bool:
        """Tell whether its rank may be asked for: now or, when it does not answer for a moment, soon."""
        return not (self.leaving or self.cordoned)

    @property
    def takes_requests(self) -> bool:
        """Tell whether it may be given a sequence now."""
        return self.is_open and not (self.suspect or self.blocked)

    @property
    def num_unapplied(self) -> int:
        """Return how many messages wait for the engine to apply them."""
        return len(self._tail)

    @property
    def next_seq(self) -> int:
        """Return the number the next staged message will get."""
        return self._next_seq

    def stage(self, message: ChannelMessage) -> list[Buffer]:
        """Give a message its number and keep it until it is applied; return its frames.

        Raises:
            TypeError: it holds something msgpack cannot carry; no number is used up.
        """
        message.channel_seq = self._next_seq
        frames = self._encoder.encode(message)
        self._tail.append((self._next_seq, frames))
        self._next_seq += 1
        return frames

    def unstage(self) -> None:
        """Take back the message staged last, which no socket accepted."""
        self._tail.pop()
        self._next_seq -= 1

    def on_applied(self, applied: int) -> None:
        """Note how far the engine has applied this client's messages.

        A number that was not sent yet belongs to an earlier connection of the same engine and is ignored.
        """
        if self.applied < applied < self._next_seq:
            self.applied = applied
            self._progressed = True
            tail = self._tail
            while tail and tail[0][0] <= applied:
                tail.popleft()

    def on_out_seq(self, out_seq: int) -> int:
        """Note the number of an output frame and return how many frames before it are missing."""
        missing = out_seq - self._out_seq - 1
        self._out_seq = max(out_seq, self._out_seq)
        return max(0, missing)

    def messages_to_resend(self, now: float) -> list[list[Buffer]]:
        """Return the unapplied tail when nothing has moved for ``RESEND_AFTER_S``; call it a few times a second."""
        if self._progressed or not self._tail:
            self._progressed = False
            self._progressed_at = now
        elif now - self._progressed_at >= RESEND_AFTER_S:
            self._progressed_at = now
            return [frames for _, frames in self._tail]
        return []


class Sender(Protocol):
    """What carries numbered messages to engines: sockets, or the inboxes of threads."""

    def send(self, connection: EngineConnection, message: ChannelMessage) -> None:
        """Send a numbered message. Whatever becomes of the send, it is kept and repeated until it is applied.

        Raises:
            TypeError: the message holds something msgpack cannot carry; nothing was sent.
        """

    def send_add(self, connection: EngineConnection, request: AddRequest) -> bool:
        """Send an ADD; False when nothing accepted it: it is taken back, to go to another engine or nowhere.

        Raises:
            TypeError: see ``send``.
        """
