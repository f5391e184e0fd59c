"""The control client: an API process's end of the control channel."""

import asyncio
from collections.abc import Mapping
from typing import Any

import zmq

from engine.wire.codec import Decoder, encode
from engine.wire.drop_counter import DropCounter
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import ClientId
from engine.wire.sockets import AsyncReceiver, SendOutcome, connect, make_socket, send_nowait
from engine.wire.tensors import Frames
from orchestrator.control.calls import Handler, OpenCalls, RpcServer
from orchestrator.control.errors import ControlUnavailableError
from orchestrator.control.messages import Call, CallResult, Hello, Message, Operation

_HIGH_WATER_MARK = 1000


class ControlClient:
    """Calls the supervisor, and serves its calls. One DEALER, on the running loop; any bytes on it are survived."""

    def __init__(self, client_id: ClientId, endpoint: str | None, handlers: Mapping[type, Handler]) -> None:
        """Open nothing yet.

        endpoint: where the supervisor listens; None when this process has none (benchmarks). handlers: of its calls.
        """
        self._client_id = client_id
        self._endpoint = endpoint
        self._open = OpenCalls()
        self._rpc = RpcServer(handlers)
        self._drop_counter = DropCounter()
        self._decoder: Decoder[Message] = Decoder(Message)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._receiver: AsyncReceiver | None = None

    def start(self) -> None:
        """Connect, and announce this process."""
        if self._endpoint is None:
            return
        self._context = zmq.Context()
        identity = f"api {self._client_id}".encode()
        self._socket = make_socket(self._context, zmq.DEALER, identity=identity, high_water_mark=_HIGH_WATER_MARK)
        connect(self._socket, self._endpoint)
        self._receiver = AsyncReceiver(self._socket, self._on_frames)
        self._send(Hello(self._client_id))

    async def call(self, operation: Operation, timeout_s: float) -> Any:
        """Call for an operation and return its result, as plain data.

        Raises:
            ControlRefusedError: the supervisor refused. ControlUnavailableError: it is not there or did not answer.
        """
        # Refused at once, instead of a time-out for what can never be answered.
        if self._endpoint is None:
            raise ControlUnavailableError("this API process runs without a supervisor, which alone can do that")
        call_id, future = self._open.open()
        try:
            if not self._send(Call(call_id, operation, timeout_s)):
                raise ControlUnavailableError("the supervisor takes no more control calls")
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise ControlUnavailableError(f"the supervisor did not answer within {timeout_s:g} s") from error
        # Given up also when the caller is cancelled: its entry in the table of open calls goes with the future.
        finally:
            future.cancel()

    def statistics(self) -> dict[str, int]:
        """Return what was dropped, by kind, and how many calls wait."""
        return {**self._drop_counter.counts, "control_calls": len(self._open)}

    async def aclose(self) -> None:
        """Close the channel; idempotent. Calls that wait end with ``ControlUnavailableError``."""
        self._open.fail_all("this API process is shutting down")
        if self._receiver is not None:
            self._receiver.close()  # first: no further call may begin to be served
        await self._rpc.aclose()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._socket = None
        self._endpoint = None

    def _send(self, message: Message) -> bool:
        if self._socket is None:
            return False
        outcome = send_nowait(self._socket, [encode(message)])
        if self._receiver is not None:
            self._receiver.poke()  # a send may swallow the socket's wake-up
        return outcome is SendOutcome.ACCEPTED

    def _respond(self, answer: CallResult) -> None:
        if not self._send(answer):
            self._drop_counter.drop("undelivered_control_answers", "the supervisor")

    def _on_frames(self, frames: Frames) -> None:
        try:
            message = self._decoder.decode_frames(frames)
        except MalformedMessageError as error:
            self._drop_counter.drop("malformed_control_messages", "the supervisor", error)
            return
        match message:
            case Call():
                self._rpc.serve(message, self._respond)
            case CallResult():
                if not self._open.resolve(message):
                    self._drop_counter.drop("late_control_answers", "the supervisor")
            case Hello():
                self._drop_counter.drop("unexpected_control_messages", "the supervisor")
