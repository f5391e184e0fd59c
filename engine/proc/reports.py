"""When to report, and the test option that makes reports late."""

from collections import deque
from typing import Generic, TypeVar

M = TypeVar("M")

MIN_GAP_S = 0.020
MAX_GAP_S = 0.200


class ReportPacer:
    """Reports on change at most every 20 ms and at least every 200 ms; pure, times are monotonic seconds."""

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def wait_s(self, changed: bool, now: float) -> float:
        """Return the seconds until the next report is due; 0 when it is due now."""
        return max(0.0, self._last_s + (MIN_GAP_S if changed else MAX_GAP_S) - now)

    def sent(self, now: float) -> None:
        """Note that a report went out."""
        self._last_s = now


class DelayQueue(Generic[M]):
    """Holds each item for a fixed time; 0 hands it on at once. Pure."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._held: deque[tuple[float, M]] = deque()

    def put(self, item: M, now: float) -> None:
        """Take an item in."""
        self._held.append((now + self._delay_s, item))

    def take_due(self, now: float) -> list[M]:
        """Return the items whose time has come, oldest first."""
        due = []
        while self._held and self._held[0][0] <= now:
            due.append(self._held.popleft()[1])
        return due

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next item is due; infinite when nothing is held."""
        return max(0.0, self._held[0][0] - now) if self._held else float("inf")
