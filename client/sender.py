"""Puts numbered messages on the request channels."""

from collections import Counter
from typing import Protocol

from client.engine_connection import EngineConnection
from client.resources import ClientResources
from engine.wire.messages import AddRequest, ChannelMessage
from engine.wire.sockets import AsyncReceiver, SendOutcome
from engine.wire.tensors import Frames
from engine.wire.tracked import TrackedSends

MAX_UNAPPLIED_MESSAGES = 10_000


class Sender(Protocol):
    """What the dispatcher needs of the request channels."""

    def send(self, connection: EngineConnection, message: ChannelMessage) -> SendOutcome:
        """Send a numbered message; whatever the outcome, it is kept and repeated until it is applied."""

    def send_add(self, connection: EngineConnection, request: AddRequest) -> bool:
        """Send an ADD; False when no socket accepted it: then it is taken back, to go to another engine or nowhere."""


class RouterSender:
    """Sends on the ROUTER. Three outcomes: accepted (only ``applied`` proves delivery), not connected, pipe full.

    A line that refused a message is ``blocked`` until ``resend`` tries it again.
    """

    def __init__(self, resources: ClientResources, counts: Counter[str]) -> None:
        self._resources = resources
        self._counts = counts
        self.tracked = TrackedSends()
        self.receiver: AsyncReceiver | None = None

    def send(self, connection: EngineConnection, message: ChannelMessage) -> SendOutcome:
        """See ``Sender``.

        Raises:
            TypeError: the message holds something msgpack cannot carry; nothing was sent.
        """
        outcome = self._send_frames(connection, connection.stage(message))
        self._poke()
        return outcome

    def send_add(self, connection: EngineConnection, request: AddRequest) -> bool:
        """See ``Sender``.

        An engine that applies nothing for too long takes no new requests either, nor, when it carries a tensor, one
        whose engines have not read the tensors before it: their memory is held until they have.
        """
        too_many_tensors = request.prompt_embeds is not None and self.tracked.is_full
        if connection.num_unapplied >= MAX_UNAPPLIED_MESSAGES or too_many_tensors:
            connection.blocked = True
            return False
        accepted = self.send(connection, request) is SendOutcome.ACCEPTED
        if not accepted:
            connection.unstage()
        return accepted

    def resend(self, connection: EngineConnection, now: float) -> None:
        """Send the unapplied tail again if it is due, and let a blocked line be tried once more."""
        connection.blocked = False
        self.tracked.sweep()
        for frames in connection.messages_to_resend(now):
            self._counts["resent_messages"] += 1
            if self._send_frames(connection, frames) is not SendOutcome.ACCEPTED:
                break
        self._poke()

    def _send_frames(self, connection: EngineConnection, frames: Frames) -> SendOutcome:
        outcome = self.tracked.send_nowait(self._resources.router, [connection.identity, *frames])
        if outcome is not SendOutcome.ACCEPTED:
            connection.blocked = True
            self._counts[f"sends_{outcome.name.lower()}"] += 1
        return outcome

    def _poke(self) -> None:
        """Look for handshakes after a send: it may have swallowed the edge of the ROUTER's descriptor."""
        if self.receiver is not None:
            self.receiver.poke()
