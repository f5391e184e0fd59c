"""Counters: named runs of numbers in this process alone, or in shared memory that outlives whoever writes it."""

import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeAlias

Numbers: TypeAlias = "list[float] | memoryview[float]"
Reading = dict[str, list[float]]
"""Name -> numbers, as they were at one moment."""

_FIRST_BYTES = 64 * 1024
_USED = struct.Struct("q")  # at the beginning: how many bytes hold records
_HEAD = struct.Struct("qq")  # of a record: bytes of its name, how many numbers it has
_VALUE_BYTES = 8


class Counters(Protocol):
    """The memory of accumulators. Names are the writer's to choose; there are few, and none is ever taken out."""

    def run(self, name: str, num_values: int) -> Numbers:
        """Return the numbers of that name, zeros when they are new; the same memory for every caller."""

    def names(self) -> list[str]:
        """Return the names there are."""


class PrivateCounters:
    """Counters of this process alone. runs: name -> numbers to begin with."""

    def __init__(self, runs: Reading | None = None) -> None:
        self._runs = {} if runs is None else runs

    def run(self, name: str, num_values: int) -> Numbers:
        """Return the numbers of that name; see ``Counters``."""
        return self._runs.setdefault(name, [0.0] * num_values)

    def names(self) -> list[str]:
        """Return the names there are."""
        return list(self._runs)


class SharedCounters:
    """Counters in the memory of a descriptor that ``make_shared_memory`` made. One process writes at a time.

    Whoever writes after a process that was killed goes on with its numbers. A number lies at a multiple of its size and
    is read and written in one piece, so nobody sees half of one; two numbers are not of one moment. A record counts
    once the number of used bytes covers it, so its writer may die anywhere in between.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, _FIRST_BYTES)
        self._map = mmap.mmap(fd, 0)
        if _used(fd) == 0:  # new, or its first writer died just then
            _USED.pack_into(self._map, 0, _USED.size)
        self._runs: dict[str, Numbers] = dict(_records(self._map, _used(fd)))

    def run(self, name: str, num_values: int) -> Numbers:
        """Return the numbers of that name; see ``Counters``."""
        if name not in self._runs:
            self._runs[name] = self._append(name.encode(), num_values)
        return self._runs[name]

    def names(self) -> list[str]:
        """Return the names there are."""
        return list(self._runs)

    def _append(self, name: bytes, num_values: int) -> Numbers:
        (begin,) = _USED.unpack_from(self._map)
        values_at = begin + _HEAD.size + _padded(len(name))
        end = values_at + num_values * _VALUE_BYTES
        while end > len(self._map):
            os.ftruncate(self._fd, 2 * len(self._map))
            self._map = mmap.mmap(self._fd, 0)  # runs handed out before keep the old map: it is the same memory
        _HEAD.pack_into(self._map, begin, len(name), num_values)
        self._map[begin + _HEAD.size : begin + _HEAD.size + len(name)] = name
        self._map[values_at:end] = bytes(end - values_at)  # a writer that died here may have left something
        _USED.pack_into(self._map, 0, end)
        return _numbers(self._map, values_at, num_values)


def make_shared_memory() -> int:
    """Return the descriptor of empty memory that child processes may inherit; it lives as long as anybody holds it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal-counters")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_counters(fd: int) -> Reading:
    """Return what is in shared memory now, whoever writes there."""
    if os.fstat(fd).st_size == 0:
        return {}
    end = _used(fd)  # before the map, which may be too small for what a writer adds behind it
    shared = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    return {name: list(numbers) for name, numbers in _records(shared, end)}


def add_up(readings: Iterable[Reading]) -> Reading:
    """Return name -> sums over the readings that know it."""
    sums: Reading = {}
    for reading in readings:
        for name, numbers in reading.items():
            known = sums.get(name)
            sums[name] = numbers if known is None else [a + b for a, b in zip(known, numbers, strict=True)]
    return sums


def _used(fd: int) -> int:
    (end,) = _USED.unpack(os.pread(fd, _USED.size, 0))
    return int(end)


def _records(shared: mmap.mmap, end: int) -> "Iterator[tuple[str, memoryview[float]]]":
    at = _USED.size
    while at < end:
        name_bytes, num_values = _HEAD.unpack_from(shared, at)
        name_at = at + _HEAD.size
        values_at = name_at + _padded(name_bytes)
        yield shared[name_at : name_at + name_bytes].decode(), _numbers(shared, values_at, num_values)
        at = values_at + num_values * _VALUE_BYTES


def _numbers(shared: mmap.mmap, at: int, num_values: int) -> "memoryview[float]":
    return memoryview(shared)[at : at + num_values * _VALUE_BYTES].cast("d")


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _VALUE_BYTES) * _VALUE_BYTES
