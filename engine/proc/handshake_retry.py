"""When a client that has said nothing yet hears once more that the engine is ready."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class HandshakeRetry:
    """Paces repetitions of the first message of a line; pure, times are monotonic seconds.

    A connection that is reset may take that message along, and a client that never got it would never say anything. The
    client's own first message proves that it came; an idle client sends none, so the pauses double.
    """

    def __init__(self, now: float) -> None:
        self._pause_s = _FIRST_PAUSE_S
        self._due = now + self._pause_s

    def is_due(self, now: float) -> bool:
        """Tell whether to repeat it now; if so, the next pause begins."""
        if now < self._due:
            return False
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._due = now + self._pause_s
        return True
