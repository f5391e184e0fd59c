"""The input thread of an engine process: requests and the group's state in, reports out, also while a step hangs."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import zmq
from msgspec.structs import replace

from engine.config.engine_spec import EngineSpec
from engine.proc.input_rules import GroupView, SequenceCheck, SequencedChannel
from engine.proc.mailbox import Mailbox
from engine.proc.output import OutputThread
from engine.proc.pacing import HandshakeRetry
from engine.proc.reports import ReportChannel
from engine.proc.shared import SharedState
from engine.wire.codec import channel_decoder, encode, state_decoder
from engine.wire.drop_counter import DropCounter
from engine.wire.errors import AddressError, MalformedMessageError
from engine.wire.ids import ClientId
from engine.wire.messages import GROUP_TOPIC, ClientInfo, EEPNotification, EngineReady, GroupState
from engine.wire.sockets import connect, make_socket, receive_nowait, send_nowait
from engine.wire.tensors import Frames

if TYPE_CHECKING:
    from engine.proc.group_inbox import GroupInbox

_MAX_MESSAGES_PER_TURN = 64
"""Taken from one socket before the others and the report get their turn."""

log = logging.getLogger(__name__)


class _RequestChannel:
    """One client's DEALER and how far its numbered messages have come. ready: the encoded message it begins with."""

    def __init__(self, socket: "zmq.Socket[bytes]", ready: bytes) -> None:
        self.socket = socket
        self.numbers = SequencedChannel()
        self._ready = ready
        self._handshake_retry = HandshakeRetry(time.monotonic())
        self._send_handshake()

    def repeat_handshake(self, now: float) -> None:
        """Send the handshake again when the client has sent nothing for long enough."""
        if not self.numbers.applied and self._handshake_retry.is_due(now):
            self._send_handshake()

    def _send_handshake(self) -> None:
        send_nowait(self.socket, [self._ready])


class InputThread:
    """Owns the DEALERs, the state socket and the report channel; opens and closes clients as the group's state says.

    A request channel begins with this engine's ``EngineReady``, and both sides count from 1 behind it. A client that
    vanishes from the list loses its sequences; should it be listed again, a new ``EngineReady`` begins a new channel.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        spec: EngineSpec,
        mailbox: Mailbox,
        shared: SharedState,
        output: OutputThread,
        inbox: "GroupInbox | None" = None,
    ) -> None:
        """Make the thread; ``start`` starts it.

        mailbox: this thread's. inbox: where the loop of a lockstep rank takes the group's state from; None for an
        independent rank, which has nothing to switch and adopts an epoch on sight.
        """
        self._context = context
        self._spec = spec
        self._mailbox = mailbox
        self._shared = shared
        self._output = output
        self._inbox = inbox
        self._make_socket = partial(make_socket, context, security=spec.security)
        self._group = GroupView(spec.engine_id)
        self._ready: EngineReady | None = None  # once the core is there; until then no client is connected to
        self._notices: list[EEPNotification] = []
        self._channels: dict[ClientId, _RequestChannel] = {}
        self._num_channels = 0
        self._drop_counter = DropCounter()
        self._decode_message = channel_decoder().decode_frames
        self._state_decoder = state_decoder()
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], None]] = {}
        self._is_finished = False
        self._thread = threading.Thread(target=self._run, name="shoal-input", daemon=True)

    def start(self) -> None:
        """Start the thread; reports flow from here on."""
        self._thread.start()

    def announce(self, ready: EngineReady, notices: Sequence[EEPNotification] = ()) -> None:
        """Open a request channel to every listed client, with ``ready`` as its first message.

        notices: sent once, to the first clients that are listed.
        """
        self._mailbox.post(self._announce, ready, notices)

    def finish(self) -> None:
        """Send a last report, close every socket and end the thread."""
        self._mailbox.post(self._finish)
        self._thread.join()

    def statistics(self) -> dict[str, int]:
        """Return what was dropped, by reason, and how many clients are connected. Approximate: read from outside."""
        return dict(self._drop_counter.counts) | {"clients": len(self._channels)}

    # --- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.exception("the input thread failed")
            self._shared.fail(f"the input thread failed: {error}")
        finally:
            for client_id in list(self._channels):
                self._close_client(client_id)

    def _serve(self) -> None:
        self._poller.register(self._mailbox.fd, zmq.POLLIN)
        self._handlers[self._mailbox.fd] = self._mailbox.run_posted
        state_socket = self._make_socket(zmq.XSUB, topics=[GROUP_TOPIC])
        reports = self._open_report_channel()
        try:
            connect(state_socket, self._spec.state_endpoint)
            self._handle(state_socket, self._on_state)
            while not self._is_finished:
                wait_ms = math.ceil(reports.wait_s(time.monotonic()) * 1000)
                for socket, _ in self._poller.poll(wait_ms):
                    handler = self._handlers.get(socket)
                    if handler is not None:  # one before it in this turn may have closed the socket
                        handler()
                now = time.monotonic()
                reports.send_due(now)
                for (
                    channel
                ) in self._channels.values():  # no timer of its own: a report ends the poll after 0.2 s at most
                    channel.repeat_handshake(now)
        finally:
            reports.close()  # with a last report, which shows why the engine stops
            state_socket.close()

    def _open_report_channel(self) -> ReportChannel:
        spec = self._spec
        return ReportChannel(
            self._context, spec.report_endpoint, self._shared, spec.engine.sim.report_delay_s, spec.security
        )

    def _handle(self, socket: "zmq.Socket[bytes]", on_message: Callable[[Frames], None]) -> None:
        """Let the poll hand a socket's messages to a callback, a bounded number at a time."""

        def receive() -> None:
            for _ in range(_MAX_MESSAGES_PER_TURN):
                if socket.closed:
                    return
                try:
                    frames = receive_nowait(socket)
                except zmq.Again:
                    return
                on_message(frames)

        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = receive

    def _finish(self) -> None:
        self._is_finished = True

    def _announce(self, ready: EngineReady, notices: Sequence[EEPNotification]) -> None:
        self._ready, self._notices = ready, list(notices)
        self._follow_clients()

    # --- the group's state ------------------------------------------------------------------------------------------

    def _on_state(self, frames: Frames) -> None:
        try:
            state = self._state_decoder.decode_frames(frames[1:])
        except MalformedMessageError as error:
            self._drop_counter.drop("malformed state", "the coordinator", error)
            return
        if not isinstance(state, GroupState):
            self._drop_counter.drop("no group state", "the coordinator")
            return
        epoch, was_member = self._group.epoch, self._group.is_member
        if self._group.update(state):
            self._shared.see_draining(is_draining=self._group.is_draining)
            self._shared.see_settings(self._group.settings)
            self._follow_group(state)
            if self._group.is_dismissed:  # not ended here: the loop first gives back what it has
                self._shared.request_stop("dismissed")
            self._follow_clients()
            # For observers: to join is no reconfiguration, and to leave has a notice of its own.
            if was_member and self._group.is_member and self._group.epoch != epoch:
                self._output.put_notice(EEPNotification.RECONFIGURE_FINISHED, self._shared.next_report_seq)

    def _follow_group(self, state: GroupState) -> None:
        if self._inbox is None:
            self._shared.see_epoch(self._group.epoch, self._group.max_epoch_seen)
        else:
            self._inbox.see(state)
            self._shared.wake()

    def _follow_clients(self) -> None:
        """Connect to clients that are new in the group's state and let go of those no longer in it."""
        if self._ready is None:
            return
        for client_id in [c for c in self._channels if c not in self._group.clients]:
            self._close_client(client_id)  # first: nothing of it may arrive behind what frees its sequences
            self._output.close(client_id)
            self._shared.free_client(client_id)
            self._shared.forget_client(client_id)
        for client_id, info in self._group.clients.items():
            if client_id not in self._channels:
                self._open_client(info, self._ready)
        while self._channels and self._notices:
            self._output.put_notice(self._notices.pop(0), self._shared.next_report_seq)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _open_client(self, info: ClientInfo, ready: EngineReady) -> None:
        client_id = info.client_id
        socket = self._make_socket(zmq.DEALER, identity=self._spec.engine_id.to_identity())
        try:
            connect(socket, info.request_endpoint)
        except AddressError as error:  # counted, not raised: what one client reports must not end the engine
            self._drop_counter.drop("bad address", f"client {client_id}", error)
            socket.close()
            return
        self._output.open(client_id, info.output_endpoint)  # before the handshake: what answers it must get through
        self._num_channels += 1
        channel = _RequestChannel(socket, encode(replace(ready, channel_number=self._num_channels)))
        self._channels[client_id] = channel
        self._handle(socket, lambda frames: self._on_message(client_id, channel.numbers, frames))

    def _close_client(self, client_id: ClientId) -> None:
        socket = self._channels.pop(client_id).socket
        self._poller.unregister(socket)
        del self._handlers[socket]
        socket.close()

    def _on_message(self, client_id: ClientId, numbers: SequencedChannel, frames: Frames) -> None:
        """Apply the next message of a client's request channel; whatever else comes is dropped."""
        try:
            message = self._decode_message(frames)
        except MalformedMessageError as error:
            self._drop_counter.drop("malformed message", f"client {client_id}", error)
            return
        if message.client_id != client_id:
            self._drop_counter.drop("foreign message", f"client {client_id}")
        elif self._shared.stop_reason is not None:  # not applied: the client sees that, and the end of the engine
            self._drop_counter.drop("stopping", f"client {client_id}")
        elif (arrival := numbers.accept(message.channel_seq)) is SequenceCheck.NEXT:
            self._shared.receive(message, time.monotonic())
        else:
            self._drop_counter.drop(arrival.value, f"client {client_id}")
