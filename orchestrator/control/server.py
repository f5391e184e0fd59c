"""The control server: the supervisor's end of the control channel."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import zmq

from engine.wire.codec import Decoder, encode
from engine.wire.drop_counter import DropCounter
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import ClientId
from engine.wire.sockets import AsyncReceiver, SendOutcome, bind, make_socket, send_nowait
from engine.wire.tensors import Frames
from orchestrator.control.calls import Handler, OpenCalls, RpcServer
from orchestrator.control.errors import ControlError, ControlUnavailableError
from orchestrator.control.messages import Call, CallResult, Hello, Message, Operation

MAX_PEERS = 1024
_HIGH_WATER_MARK = 1000


class ControlServer:
    """Serves the calls of API processes, and calls all of them at once. One ROUTER, on the running loop.

    It is bound in the run folder, which this user alone may enter. A peer may still send anything: bytes that are no
    message of this channel are counted and dropped.
    """

    def __init__(self, endpoint: str, handlers: Mapping[type, Handler]) -> None:
        """Listen. handlers: of the calls of API processes, by the type of the operation; looked up at each call.

        Raises:
            AddressError: the endpoint cannot be bound.
        """
        self._open = OpenCalls()
        self._rpc = RpcServer(handlers)
        self._drop_counter = DropCounter()
        self._decoder: Decoder[Message] = Decoder(Message)
        self._peers: dict[ClientId, bytes] = {}
        self._called: dict[asyncio.Future[Any], ClientId] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = make_socket(self._context, zmq.ROUTER, high_water_mark=_HIGH_WATER_MARK)
            self.endpoint = bind(self._socket, endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._receiver = AsyncReceiver(self._socket, self._on_frames)

    @property
    def peers(self) -> list[ClientId]:
        """Return the API processes that can be called."""
        return sorted(self._peers)

    async def call_all(self, operation: Operation, timeout_s: float) -> dict[ClientId, Any]:
        """Call every API process at once; return what each answered, or the ``ControlError`` that its call became.

        One that has ended, or ends meanwhile, is left out: what it had is gone with it.

        Raises:
            ControlUnavailableError: too many calls wait already.
        """
        futures: dict[ClientId, asyncio.Future[Any]] = {}
        try:
            for client_id in self.peers:
                futures[client_id] = self._call(client_id, operation, timeout_s)
            if futures:
                await asyncio.wait(futures.values(), timeout=timeout_s)
            return {
                client_id: _outcome(future, timeout_s)
                for client_id, future in futures.items()
                if not future.cancelled()
            }
        finally:
            for future in futures.values():
                future.cancel()

    def forget(self, client_id: ClientId) -> None:
        """Call an API process no more: it has ended."""
        self._peers.pop(client_id, None)
        for future in [future for future, called in self._called.items() if called == client_id]:
            future.cancel()

    def statistics(self) -> dict[str, int]:
        """Return what was dropped, by kind, and how many peers and calls there are."""
        return {**self._drop_counter.counts, "control_peers": len(self._peers), "control_calls": len(self._open)}

    async def aclose(self) -> None:
        """Close the channel; calls that are being served are cancelled."""
        self._open.fail_all("the supervisor is shutting down")
        self._receiver.close()  # first: no further call may begin to be served
        await self._rpc.aclose()
        self._context.destroy(linger=0)

    def _call(self, client_id: ClientId, operation: Operation, timeout_s: float) -> "asyncio.Future[Any]":
        """Return the future of one call; it is cancelled when the process is gone."""
        call_id, future = self._open.open()
        self._called[future] = client_id
        future.add_done_callback(self._called.pop)
        match self._send(self._peers[client_id], Call(call_id, operation, timeout_s)):
            # It has ended, which the supervisor will see in a moment; its call would never be answered.
            case SendOutcome.NOT_CONNECTED:
                self.forget(client_id)
            case SendOutcome.FULL:
                future.set_exception(ControlUnavailableError("it takes no more control calls"))
        return future

    def _send(self, identity: bytes, message: Message) -> SendOutcome:
        outcome = send_nowait(self._socket, [identity, encode(message)])
        self._receiver.poke()  # a send may swallow the socket's wake-up
        return outcome

    def _respond(self, identity: bytes, answer: CallResult) -> None:
        if self._send(identity, answer) is not SendOutcome.ACCEPTED:
            self._drop_counter.drop("undelivered_control_answers", identity.hex())

    def _on_frames(self, frames: Frames) -> None:
        identity = bytes(frames[0])
        try:
            message = self._decoder.decode_frames(frames[1:])
        except MalformedMessageError as error:
            self._drop_counter.drop("malformed_control_messages", identity.hex(), error)
            return
        match message:
            case Hello(client_id):
                self._register(client_id, identity)
            case Call():
                self._rpc.serve(message, partial(self._respond, identity))
            case CallResult():
                if not self._open.resolve(message):
                    self._drop_counter.drop("late_control_answers", identity.hex())

    def _register(self, client_id: ClientId, identity: bytes) -> None:
        # The index is the process's place: what connects under a higher incarnation has replaced the older one.
        for known in [known for known in self._peers if known.index == client_id.index and known != client_id]:
            if known.incarnation > client_id.incarnation:
                self._drop_counter.drop("stale_control_peers", str(client_id))
                return
            self.forget(known)
        # A bound, because any process of this user may connect here and call itself a client.
        if len(self._peers) < MAX_PEERS:
            self._peers[client_id] = identity
        else:
            self._drop_counter.drop("superfluous_control_peers", str(client_id))


def _outcome(future: "asyncio.Future[Any]", timeout_s: float) -> Any:
    # Not an exception of the whole call: the others have answered.
    if not future.done():
        return ControlError(f"no answer within {timeout_s:g} s")
    error = future.exception()
    return future.result() if error is None else error
