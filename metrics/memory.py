"""The memory that the API processes of a deployment share: who holds it, and how it is cut."""

import mmap
import os

from msgspec import Struct

from metrics.shared_counters import make_shared_memory
from metrics.shared_status import NUM_ROW_VALUES, StatusRow

_ROW_BYTES = NUM_ROW_VALUES * 8


class StatsMemory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Descriptors of memory that children inherit under the same numbers; part of an API process's spec.

    status: a row per process. counts: by process index, what that process and all before it at its index have counted.
    The supervisor holds them all, so nothing that was counted is lost with a process, and nothing is left behind.
    """

    status: int
    counts: list[int]

    @classmethod
    def make(cls, num_processes: int) -> "StatsMemory":
        """Return empty memory for that many processes."""
        status = make_shared_memory()
        os.ftruncate(status, num_processes * _ROW_BYTES)
        return cls(status=status, counts=[make_shared_memory() for _ in range(num_processes)])

    @property
    def fds(self) -> tuple[int, ...]:
        """Return every descriptor."""
        return (self.status, *self.counts)

    def rows(self) -> list[StatusRow]:
        """Return the rows of the shared status, by process index."""
        numbers = memoryview(mmap.mmap(self.status, len(self.counts) * _ROW_BYTES)).cast("d")
        starts = range(0, len(numbers), NUM_ROW_VALUES)
        return [StatusRow(index, numbers[start : start + NUM_ROW_VALUES]) for index, start in enumerate(starts)]

    def close(self) -> None:
        """Let go of the memory; it ends with the last process that holds it."""
        for fd in self.fds:
            os.close(fd)
