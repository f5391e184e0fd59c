"""Messages to frames and back, with one reused encoder and decoder per line.

A message is one msgpack frame. Encoders return fresh ``bytes`` every time: a reused buffer would be overwritten while
ZeroMQ's I/O thread still reads it. Every decoder is total: any bytes give a message or ``MalformedMessageError``.
"""

from typing import Any, Generic, TypeVar

import msgspec

from engine.wire.errors import MalformedMessageError
from engine.wire.messages import EngineCoreOutputs, EngineReady, LineMessage, Report, StateMessage

M = TypeVar("M")

Buffer = bytes | bytearray | memoryview

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """Encode one wire message; thread-safe."""
    return _ENCODER.encode(message)


class Decoder(Generic[M]):
    """Decodes the messages of one line."""

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)

    def decode(self, frame: Buffer) -> M:
        """Decode one frame.

        Raises:
            MalformedMessageError: whatever is wrong with the bytes.
        """
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
            raise MalformedMessageError(str(error)) from error


def line_decoder() -> "Decoder[LineMessage]":
    """Return a decoder for what a client sends to an engine."""
    return Decoder(LineMessage)


def ready_decoder() -> "Decoder[EngineReady]":
    """Return a decoder for what an engine sends back on the request line."""
    return Decoder(EngineReady)


def output_decoder() -> "Decoder[EngineCoreOutputs]":
    """Return a decoder for the output line."""
    return Decoder(EngineCoreOutputs)


def report_decoder() -> "Decoder[Report]":
    """Return a decoder for what arrives at the coordinator."""
    return Decoder(Report)


def state_decoder() -> "Decoder[StateMessage]":
    """Return a decoder for what the coordinator publishes (the frame behind the topic)."""
    return Decoder(StateMessage)
