"""The codec: messages to frames and back, with one reused encoder and decoder per channel. Pure.

A message is one msgpack frame, and behind it one frame for each tensor in it. Encoders return fresh ``bytes`` every
time: a reused buffer would be overwritten while ZeroMQ's I/O thread still reads it. Every decoder is total: any bytes
in any frames give a message or ``MalformedMessageError``.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from engine.wire.errors import MalformedMessageError
from engine.wire.messages import ChannelMessage, EngineCoreOutputs, EngineReady, Report, StateMessage
from engine.wire.tensors import Buffer, TensorFrames

M = TypeVar("M")

_ENCODER = msgspec.msgpack.Encoder()
_NO_MESSAGE = (OverflowError, UnicodeEncodeError, RecursionError)
"""Raised by msgpack besides ``TypeError``: integers of more than 64 bits, halves of surrogate pairs, depth."""


def encode(message: Any) -> bytes:
    """Encode one wire message without tensors; thread-safe.

    Raises:
        TypeError: it holds something msgpack cannot carry, or a tensor.
    """
    try:
        return _ENCODER.encode(message)
    except _NO_MESSAGE as error:
        raise TypeError(f"this cannot travel: {error}") from error


class FrameEncoder:
    """The encoder of messages that may hold tensors. Not thread-safe: every sender has its own."""

    def __init__(self) -> None:
        self._tensors = TensorFrames()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._tensors.put)

    def encode(self, message: Any) -> list[Buffer]:
        """Return the message's frame and, without a copy, one for each of its tensors.

        Raises:
            TypeError: it holds something that cannot travel.
        """
        try:
            frame = self._encoder.encode(message)
        except _NO_MESSAGE as error:
            raise TypeError(f"this cannot travel: {error}") from error
        finally:  # also when it failed: its tensors must not go out with the next message
            tensors = self._tensors.collected()
        return [frame, *tensors]


class Decoder(Generic[M]):
    """The decoder of the messages of one channel. Not thread-safe: every receiver has its own."""

    def __init__(self, message_type: Any) -> None:
        self._tensors = TensorFrames()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type, dec_hook=self._tensors.take)

    def decode(self, frame: Buffer) -> M:
        """Decode a message of one frame; it holds no tensors.

        Raises:
            MalformedMessageError: whatever is wrong with the bytes.
        """
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
            raise MalformedMessageError(str(error)) from error

    def decode_frames(self, frames: Sequence[Buffer]) -> M:
        """Decode a message and the tensors behind it, which share the memory of their frames.

        Raises:
            MalformedMessageError: whatever is wrong with the bytes, or with the number and sizes of the frames.
        """
        if len(frames) == 1:  # nearly every message
            return self.decode(frames[0])
        if not frames:
            raise MalformedMessageError("a message without frames")
        self._tensors.begin(frames[1:])
        try:
            message = self.decode(frames[0])
        finally:
            fault = self._tensors.finish()
        if fault is not None:
            raise MalformedMessageError(fault)
        return message


def channel_decoder() -> "Decoder[ChannelMessage]":
    """Return a decoder of the request channel, for engines."""
    return Decoder(ChannelMessage)


def ready_decoder() -> "Decoder[EngineReady]":
    """Return a decoder of the request channel, for clients: handshakes come back on it."""
    return Decoder(EngineReady)


def output_decoder() -> "Decoder[EngineCoreOutputs]":
    """Return a decoder of the output channel."""
    return Decoder(EngineCoreOutputs)


def report_decoder() -> "Decoder[Report]":
    """Return a decoder of the report channel."""
    return Decoder(Report)


def state_decoder() -> "Decoder[StateMessage]":
    """Return a decoder of the state channel, for the frame behind the topic."""
    return Decoder(StateMessage)
