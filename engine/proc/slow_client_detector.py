"""How long the engine goes on for a client that takes nothing."""

from enum import Enum


class Verdict(Enum):
    """What has become of a client that refuses frames."""

    STALLED = "stalled"
    DEAD = "dead"


class SlowClientDetector:
    """Measures how long one client has taken nothing from a non-empty output queue; pure, times are monotonic seconds.

    stall_s: after this long it is STALLED, told once, until it takes again. dead_s: after this long it is DEAD, and
    again each time that much more has passed.
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
        """Return the seconds until ``judge`` may have something to say; infinite while the client takes."""
        if self._since is None:
            return float("inf")
        limit_s = self._dead_s if self.is_stalled else min(self._stall_s, self._dead_s)
        return max(0.0, self._since + limit_s - now)
