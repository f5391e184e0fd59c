"""Names of engines, clients and requests that stay unambiguous across restarts. Pure."""

import struct
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

_IDENTITY = struct.Struct(">cII")

Number = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
"""A number that fits a routing id; decoders refuse anything else, so that no hostile id gets past them."""


class EngineId(Struct, array_like=True, frozen=True, order=True, gc=False):
    """One engine process: a rank, and which of the processes that have served it.

    rank: stable number of a data-parallel member, a small int >= 0; those of a deployment need not be contiguous.
    incarnation: counts the engines of that rank from 1, so that frames of a dead predecessor are recognisable.
    """

    rank: Number
    incarnation: Number

    def __str__(self) -> str:
        return f"{self.rank}.{self.incarnation}"

    def to_identity(self) -> bytes:
        """Return the ZeroMQ routing id of this engine's DEALER (9 bytes)."""
        return _IDENTITY.pack(b"E", self.rank, self.incarnation)

    @staticmethod
    def from_identity(identity: bytes) -> "EngineId | None":
        """Read a ROUTER's identity frame; None when it is not one of ours."""
        if len(identity) != _IDENTITY.size or identity[:1] != b"E":
            return None
        _, rank, incarnation = _IDENTITY.unpack(identity)
        return EngineId(rank, incarnation)


class ClientId(Struct, array_like=True, frozen=True, order=True, gc=False):
    """The client of one API process.

    index: stable number of the API process, 0..K-1.
    incarnation: counts the processes of that index from 1; a restarted one takes nothing meant for its predecessor.
    """

    index: Number
    incarnation: Number

    def __str__(self) -> str:
        return f"{self.index}.{self.incarnation}"


_COUNTER_BITS = 40
_INCARNATION_BITS = 12
_INDEX_BITS = 12


class RequestIds:
    """Draws request ids that no other client of the deployment draws, whatever id the caller sent.

    An id is an unsigned 64-bit int: 12 bits client index, 12 bits incarnation (modulo), 40 bits counter.
    """

    def __init__(self, client_id: ClientId) -> None:
        assert client_id.index < 1 << _INDEX_BITS, "the index must fit the id"
        incarnation = client_id.incarnation % (1 << _INCARNATION_BITS)
        self._base = (client_id.index << _INCARNATION_BITS | incarnation) << _COUNTER_BITS
        self._next = 0

    def draw(self) -> int:
        """Return the next id."""
        self._next += 1
        return self._base | self._next


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 2"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
