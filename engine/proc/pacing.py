"""The timers of an engine process: when a handshake, a heartbeat, a verdict on a slow client or a report is due.

All are pure: ``now`` is an argument, in monotonic seconds. ``wait_s`` returns the seconds until something is due, so
that the thread that owns a timer knows how long it may sleep.
"""

from collections import deque
from enum import Enum
from typing import Generic, TypeVar

M = TypeVar("M")

HANDSHAKE_FIRST_PAUSE_S = 1.0
HANDSHAKE_LONGEST_PAUSE_S = 30.0

HEARTBEAT_FIRST_GAP_S = 0.5
"""After the last frame with content: a lost one is noticed this much later."""

HEARTBEAT_NEXT_GAP_S = 2.0
"""After an empty frame: it may have been lost as well."""

REPORT_MIN_GAP_S = 0.020
REPORT_MAX_GAP_S = 0.200


class HandshakeRetry:
    """Repeats the first message of a request channel until the client has sent one of its own.

    A connection that is reset may take that message along, and a client that never got it would never send anything.
    Only the client's first message proves that it came. An idle client sends none for long, so the pauses double.
    """

    def __init__(self, now: float) -> None:
        self._pause_s = HANDSHAKE_FIRST_PAUSE_S
        self._due = now + self._pause_s

    def is_due(self, now: float) -> bool:
        """Tell whether to repeat it now; if so, the next pause begins."""
        if now < self._due:
            return False
        # From now, not from when it was due: a thread that came late must not repeat it twice in a row.
        self._pause_s = min(2 * self._pause_s, HANDSHAKE_LONGEST_PAUSE_S)
        self._due = now + self._pause_s
        return True


class Heartbeat:
    """Paces empty output frames to one client.

    The client sees a lost frame by the number of the next one. Behind the last frame of all there would be none, so an
    empty one follows it, and again now and then. It travels the same way and in order, so unlike a number in a report
    it can never overtake the frames it counts.
    """

    def __init__(self, now: float) -> None:
        self._due = now + HEARTBEAT_FIRST_GAP_S

    def on_sent(self, now: float, *, is_empty: bool) -> None:
        """Note that a frame went out."""
        self._due = now + (HEARTBEAT_NEXT_GAP_S if is_empty else HEARTBEAT_FIRST_GAP_S)

    def wait_s(self, now: float) -> float:
        """Return the seconds until an empty frame is due; 0 when it is due now."""
        return max(0.0, self._due - now)


class Verdict(Enum):
    """What has become of a client that refuses frames."""

    STALLED = "stalled"
    DEAD = "dead"


class SlowClientDetector:
    """Measures how long one client has taken nothing from a non-empty output queue.

    stall_s: after this long it is STALLED, reported once, until it takes again. dead_s: after this long it is DEAD, and
    again each time that much more has passed, because its queue fills anew.
    """

    def __init__(self, stall_s: float, dead_s: float) -> None:
        self._stall_s = stall_s
        self._dead_s = dead_s
        self._since: float | None = None
        self.is_stalled = False

    def on_refused(self, now: float) -> None:
        """Note that its pipe refused a frame."""
        if self._since is None:
            self._since = now

    def on_taken(self) -> bool:
        """Note that its pipe took a frame; True when this ends a stall."""
        was_stalled, self.is_stalled = self.is_stalled, False
        self._since = None
        return was_stalled

    def judge(self, now: float) -> Verdict | None:
        """Return what became true by now; to be asked again after ``wait_s``."""
        if self._since is None:
            return None
        if now >= self._since + self._dead_s:
            self._since = now
            return Verdict.DEAD
        if not self.is_stalled and now >= self._since + self._stall_s:
            self.is_stalled = True
            return Verdict.STALLED
        return None

    def wait_s(self, now: float) -> float:
        """Return the seconds until ``judge`` may return a verdict; infinite while the client takes."""
        if self._since is None:
            return float("inf")
        limit_s = self._dead_s if self.is_stalled else min(self._stall_s, self._dead_s)
        return max(0.0, self._since + limit_s - now)


class ReportPacer:
    """Reports on change at most every 20 ms, and at least every 200 ms."""

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def wait_s(self, changed: bool, now: float) -> float:
        """Return the seconds until the next report is due; 0 when it is due now."""
        return max(0.0, self._last_s + (REPORT_MIN_GAP_S if changed else REPORT_MAX_GAP_S) - now)

    def on_sent(self, now: float) -> None:
        """Note that a report went out."""
        self._last_s = now


class DelayQueue(Generic[M]):
    """Holds each item for a fixed time; 0 hands it on at once. Behind the test option that makes reports late."""

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
