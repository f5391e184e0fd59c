"""Numbers in shared memory: kept, continued, read by others, whole whenever their writer dies."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from metrics.shared_counters import PrivateCounters, SharedCounters, add_up, make_shared_memory, read_counters


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = make_shared_memory()
    yield descriptor
    os.close(descriptor)


def test_what_one_writes_another_reads_at_once(fd: int) -> None:
    counters = SharedCounters(fd)
    numbers = counters.run("a", 2)
    assert read_counters(fd) == {"a": [0, 0]}
    numbers[1] += 2.5
    counters.run("b/name", 1)[0] = 7
    assert read_counters(fd) == {"a": [0, 2.5], "b/name": [7]}


def test_memory_that_nobody_wrote_to_holds_nothing(fd: int) -> None:
    assert read_counters(fd) == {}


def test_a_successor_goes_on_with_the_numbers(fd: int) -> None:
    SharedCounters(fd).run("a", 3)[2] = 5
    successor = SharedCounters(fd)
    assert successor.names() == ["a"]
    successor.run("a", 3)[2] += 1
    successor.run("b", 1)[0] = 1
    assert read_counters(fd) == {"a": [0, 0, 6], "b": [1]}


def test_memory_grows_and_runs_from_before_stay_the_same_memory(fd: int) -> None:
    counters = SharedCounters(fd)
    early = counters.run("early", 1)
    for number in range(200):
        counters.run(f"run {number}", 100)[99] = number
    early[0] = 3
    found = read_counters(fd)
    assert found["early"] == [3]
    assert [found[f"run {number}"][99] for number in range(200)] == list(range(200))
    assert SharedCounters(fd).run("early", 1)[0] == 3


def test_half_a_record_of_a_dead_writer_counts_for_nothing(fd: int) -> None:
    SharedCounters(fd).run("a", 1)[0] = 1
    used = int.from_bytes(os.pread(fd, 8, 0), sys.byteorder)
    os.pwrite(fd, b"\x07" * 64, used)
    assert read_counters(fd) == {"a": [1]}
    assert list(SharedCounters(fd).run("b", 2)) == [0, 0]


def test_a_writer_that_died_before_its_first_number_leaves_memory_that_its_successor_can_use(fd: int) -> None:
    os.ftruncate(fd, 64 * 1024)  # as far as it got
    assert read_counters(fd) == {}
    SharedCounters(fd).run("a", 2)[1] = 3
    SharedCounters(fd).run("b", 1)[0] = 4
    assert read_counters(fd) == {"a": [0, 3], "b": [4]}


def test_a_reading_is_whole_while_the_memory_grows(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = SharedCounters(fd)
    counters.run("a", 1)[0] = 1
    make_map = mmap.mmap

    def make_map_then_grow(*arguments: Any, **options: Any) -> mmap.mmap:
        made = make_map(*arguments, **options)
        monkeypatch.undo()
        counters.run("large", 100_000)[99_999] = 2
        return made

    monkeypatch.setattr("metrics.shared_counters.mmap.mmap", make_map_then_grow)
    assert read_counters(fd) == {"a": [1]}
    assert read_counters(fd)["large"][-1] == 2


WRITER = """
import sys
from metrics.shared_counters import SharedCounters
numbers = SharedCounters(int(sys.argv[1])).run("count", 1)
while True:
    numbers[0] += 1
    if numbers[0] == 1000:
        print("counted", flush=True)
"""


def test_what_was_read_once_is_there_after_the_writer_was_killed(fd: int) -> None:
    command = [sys.executable, "-c", WRITER, str(fd)]
    with subprocess.Popen(command, pass_fds=(fd,), stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        last = 0.0
        for _ in range(2_000):
            seen = read_counters(fd)["count"][0]
            assert seen >= last
            assert seen.is_integer()
            last = seen
        writer.send_signal(signal.SIGKILL)
    assert read_counters(fd)["count"][0] >= last >= 1000


def test_private_cells_hold_on_to_what_they_handed_out() -> None:
    counters = PrivateCounters()
    counters.run("a", 1)[0] += 4
    assert (counters.names(), counters.run("a", 1)[0]) == (["a"], 4)


def test_sums_are_by_name() -> None:
    assert add_up([{"a": [1, 2], "b": [3]}, {"a": [10, 20]}, {}]) == {"a": [11, 22], "b": [3]}
