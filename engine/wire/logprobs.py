"""Log-probabilities as they travel: packed numbers, because a list of floats costs more than the tokens. Pure."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

_ITEM_BYTES = 4


class PositionLogprobs(NamedTuple):
    """One token: its own log-probability, and the best tokens at its place with theirs, best first."""

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


class Logprobs(Struct, array_like=True, frozen=True, gc=False):
    """Log-probabilities of n consecutive tokens, packed.

    Natural logarithms of the model's own probabilities, before penalties, masks, temperature and filters.
    num_top: best tokens per position (k). chosen: n float32. top_ids: n * k int32. top_values: n * k float32. All are
    little-endian, position after position.
    """

    num_top: int
    chosen: bytes = b""
    top_ids: bytes = b""
    top_values: bytes = b""

    def __len__(self) -> int:
        return len(self.chosen) // _ITEM_BYTES

    def __add__(self, later: "Logprobs") -> "Logprobs":
        return Logprobs(
            self.num_top,
            self.chosen + later.chosen,
            self.top_ids + later.top_ids,
            self.top_values + later.top_values,
        )

    def positions(self) -> Iterator[PositionLogprobs]:
        """Yield one entry per token.

        Raises:
            struct.error: the parts do not have the lengths that belong together.
        """
        count, k = len(self), self.num_top
        chosen = struct.unpack(f"<{count}f", self.chosen)
        ids = struct.unpack(f"<{count * k}i", self.top_ids)
        values = struct.unpack(f"<{count * k}f", self.top_values)
        for index, value in enumerate(chosen):
            best = slice(index * k, (index + 1) * k)
            yield PositionLogprobs(value, ids[best], values[best])
