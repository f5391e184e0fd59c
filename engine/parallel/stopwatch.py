"""Stopwatches for the time inside exchanges: on the host's clock where the host does them, else on the device's."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

MAX_LAPS = 10_000
"""Laps on a device that are not read yet; then the oldest is dropped. A step has four for each layer with experts."""


class Stopwatch(Protocol):
    """Adds up the time of laps; used by one thread at a time."""

    @property
    def seconds(self) -> float:
        """Return the time of all laps that have ended; only grows."""

    def lap(self) -> AbstractContextManager[None]:
        """Return a context whose time counts."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    """Return one for exchanges of rows that lie on a device."""
    return DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch()


class HostStopwatch:
    """Counts wall time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def lap(self) -> Iterator[None]:
        """See ``Stopwatch``."""
        began_at = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began_at


class DeviceStopwatch:
    """Counts from when the device gets to an exchange until it has passed it.

    The host's clock would count what the device still computes when the host waits for an exchange already. Events are
    left in the stream and read with ``seconds``, so that no lap makes the host wait.
    """

    def __init__(self, device: torch.device, make_event: Any = torch.cuda.Event) -> None:
        """device: whose current stream is watched. make_event: as ``torch.cuda.Event``."""
        self._device = device
        self._make_event = make_event
        self._laps: deque[tuple[Any, Any]] = deque(maxlen=MAX_LAPS)
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """See ``Stopwatch``; a lap that the device has not passed yet counts the next time."""
        while self._laps and self._laps[0][1].query():
            first, last = self._laps.popleft()
            self._seconds += first.elapsed_time(last) / 1000
        return self._seconds

    @contextmanager
    def lap(self) -> Iterator[None]:
        """See ``Stopwatch``; one that breaks off does not count."""
        first = self._record()
        yield
        self._laps.append((first, self._record()))

    def _record(self) -> Any:
        event = self._make_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
