"""Tensors as values of messages, each of which travels as a frame of its own behind the message. Pure.

Nothing here computes: a user of the numbers wraps the buffer in an array of its own library, without a copy.
"""

from collections.abc import Sequence
from typing import Any

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}
"""Number formats that travel, little-endian, and their sizes."""

MAX_DIMENSIONS = 8

Buffer = bytes | memoryview

Frames = list[Buffer]
"""One message as it is sent and received: the encoded message, and behind it one frame for each tensor in it."""


class Tensor:
    """A dense array: number format, shape, and its numbers in row-major order. It is never written to again.

    data: flat bytes, a view of somebody's memory (of a received frame, of an array), which lives as long as the view.
    """

    __slots__ = ("__weakref__", "data", "dtype", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: Any) -> None:
        """Wrap any C-contiguous buffer.

        Raises:
            ValueError: an unknown format, no shape, or a buffer of another size.
        """
        if dtype not in ITEM_BYTES:
            raise ValueError(f"a tensor of {dtype!r}; known are {', '.join(ITEM_BYTES)}")
        if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
            raise ValueError(f"a tensor of the shape {list(shape)[: MAX_DIMENSIONS + 1]}")
        view = memoryview(data)
        self.dtype = dtype
        self.shape = tuple(shape)
        self.data = view.cast("B") if view.nbytes else memoryview(b"")
        if self.data.nbytes != _num_items(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"a tensor of {dtype}{list(shape)} in {self.data.nbytes} bytes")

    @property
    def num_bytes(self) -> int:
        """Return the size of its numbers."""
        return self.data.nbytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return (self.dtype, self.shape, self.data) == (other.dtype, other.shape, other.data)

    __hash__ = None  # type: ignore[assignment]  # its bytes may be a view of memory, and many

    def __repr__(self) -> str:
        return f"Tensor({self.dtype!r}, {self.shape})"


class TensorFrames:
    """The frames behind one message while that is encoded or decoded: the n-th tensor in it is the n-th frame.

    In the message itself a tensor is ``[n, dtype, shape]``. Not thread-safe: every encoder and decoder has its own.
    """

    def __init__(self) -> None:
        self._frames: Sequence[Buffer] = ()
        self._collected: list[Buffer] = []
        self._num_taken = 0

    # --- encoding ---------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> Any:
        """Collect a tensor and return what stands for it in the message; an ``enc_hook`` of msgspec.

        Raises:
            TypeError: it is no tensor, and nothing else that travels.
        """
        if not isinstance(value, Tensor):
            raise TypeError(f"a {type(value).__name__} cannot travel")
        self._collected.append(value.data)
        return len(self._collected), value.dtype, value.shape

    def collected(self) -> list[Buffer]:
        """Return the frames of the message that was encoded, and begin the next one."""
        if not self._collected:
            return []
        frames, self._collected = self._collected, []
        return frames

    # --- decoding ---------------------------------------------------------------------------------------------------

    def begin(self, frames: Sequence[Buffer]) -> None:
        """Expect a message with these frames behind it."""
        self._frames = frames
        self._num_taken = 0

    def take(self, kind: type, header: Any) -> Any:
        """Return the tensor a header stands for; a ``dec_hook`` of msgspec.

        Raises:
            ValueError: the header is none, its frame is not there or not the next one, or it has another size.
        """
        assert kind is Tensor, "messages hold no other type of ours"
        match header:
            case [int(number), str(dtype), [*shape]] if all(type(size) is int for size in shape):
                if number != self._num_taken + 1 or number > len(self._frames):
                    raise ValueError(f"tensor frame {number} of {len(self._frames)}, after {self._num_taken}")
                self._num_taken = number
                return Tensor(dtype, shape, self._frames[number - 1])
        raise ValueError("no tensor header")

    def finish(self) -> str | None:
        """Let go of the frames; return what is wrong when one of them belongs to no tensor."""
        num_left = len(self._frames) - self._num_taken
        self._frames, self._num_taken = (), 0
        return f"{num_left} frames belong to no tensor" if num_left else None


def _num_items(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
