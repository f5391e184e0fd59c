"""The memory that the API processes of a deployment share: who holds it, and how it is cut."""

import mmap
import os

from msgspec import Struct

from metrics.board import NUM_ROW_CELLS, BoardRow
from metrics.cells import make_shared_memory

_ROW_BYTES = NUM_ROW_CELLS * 8


class StatsMemory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Descriptors of memory that children inherit under the same numbers; part of an API process's spec.

    board: a row per process. counts: by process index, what that process and all before it in its seat have counted.
    The supervisor holds them all, so nothing that was counted is lost with a process, and nothing is left behind.
    """

    board: int
    counts: list[int]

    @classmethod
    def make(cls, num_processes: int) -> "StatsMemory":
        """Return empty memory for that many processes."""
        board = make_shared_memory()
        os.ftruncate(board, num_processes * _ROW_BYTES)
        return cls(board=board, counts=[make_shared_memory() for _ in range(num_processes)])

    @property
    def fds(self) -> tuple[int, ...]:
        """Return every descriptor."""
        return (self.board, *self.counts)

    def rows(self) -> list[BoardRow]:
        """Return the rows of the board, by process index."""
        numbers = memoryview(mmap.mmap(self.board, len(self.counts) * _ROW_BYTES)).cast("d")
        starts = range(0, len(numbers), NUM_ROW_CELLS)
        return [BoardRow(index, numbers[start : start + NUM_ROW_CELLS]) for index, start in enumerate(starts)]

    def close(self) -> None:
        """Let go of the memory; it ends with the last process that holds it."""
        for fd in self.fds:
            os.close(fd)
