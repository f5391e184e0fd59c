"""Time of exchanges: by the host's clock, or by events that a device passes when it gets there."""

import time
from typing import Any

import pytest
import torch

from engine.parallel import stopwatch as module
from engine.parallel.stopwatch import DeviceStopwatch, HostStopwatch, make_stopwatch


class Stream:
    """A device's queue: what is recorded in it happens when the device gets to it, at ``now_ms``."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._waiting: list[Event] = []

    def make_event(self, *, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event()

    def put(self, event: "Event") -> None:
        self._waiting.append(event)

    def advance(self, duration_ms: float, num_events: int) -> None:
        """Compute for so long, and then pass the next events."""
        self.now_ms += duration_ms
        for event in self._waiting[:num_events]:
            event.passed_at_ms = self.now_ms
        del self._waiting[:num_events]


class Event:
    """As ``torch.cuda.Event``, as far as it is used."""

    passed_at_ms: float | None = None

    def record(self, stream: Stream) -> None:
        stream.put(self)

    def query(self) -> bool:
        return self.passed_at_ms is not None

    def elapsed_time(self, later: "Event") -> float:
        assert self.passed_at_ms is not None
        assert later.passed_at_ms is not None
        return later.passed_at_ms - self.passed_at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    queue = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queue)
    return queue


def test_the_host_counts_wall_time_of_laps_broken_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 1.25, 5.0, 5.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    watch = HostStopwatch()
    with watch.lap():
        pass
    with pytest.raises(ValueError, match="broken"), watch.lap():
        raise ValueError("broken")
    assert watch.seconds == 0.75


def test_a_device_counts_from_when_it_gets_to_an_exchange(stream: Stream) -> None:
    watch = DeviceStopwatch(torch.device("cuda"), stream.make_event)
    for _ in range(2):
        with watch.lap():
            pass
    assert watch.seconds == 0.0, "the device still computes, and nobody waits for it"
    stream.advance(50.0, 1)
    stream.advance(4.0, 2)
    assert watch.seconds == 0.004
    stream.advance(2.0, 1)
    assert watch.seconds == 0.006


def test_what_nobody_reads_is_bounded(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LAPS", 2)
    watch: Any = DeviceStopwatch(torch.device("cuda"), stream.make_event)
    for _ in range(3):
        with watch.lap():
            stream.advance(1.0, 1)
        stream.advance(1.0, 1)
    assert watch.seconds == pytest.approx(0.002)


@pytest.mark.parametrize(("device", "kind"), [("cpu", HostStopwatch), ("cuda:1", DeviceStopwatch)])
def test_rows_on_a_device_are_timed_by_it(device: str, kind: type) -> None:
    assert isinstance(make_stopwatch(torch.device(device)), kind)
