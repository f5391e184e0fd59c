"""When a client that is told nothing hears where the numbers stand."""

FIRST_GAP_S = 0.5
"""After the last frame that said something: a lost one is noticed this much later."""

NEXT_GAP_S = 2.0
"""After a frame that said nothing: it may have been lost as well."""


class Heartbeat:
    """Paces empty output frames to one client; pure, times are monotonic seconds.

    The client sees a lost frame by the number of the next one. Behind the last frame of all there would be none, so an
    empty one follows it, and again now and then. It travels the same way and in order, so unlike a number in a report
    it can never overtake what it speaks of.
    """

    def __init__(self, now: float) -> None:
        self._due = now + FIRST_GAP_S

    def on_sent(self, now: float, *, is_empty: bool) -> None:
        """Note that a frame went out."""
        self._due = now + (NEXT_GAP_S if is_empty else FIRST_GAP_S)

    def wait_s(self, now: float) -> float:
        """Return the seconds until an empty frame is due; 0 when it is due now."""
        return max(0.0, self._due - now)
