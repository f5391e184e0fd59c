"""The receiving end of one numbered request line."""

from enum import Enum


class Arrival(Enum):
    """What a number says about its message."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    GAP = "gap"


class NumberedLine:
    """Counts one client's messages to this engine; pure.

    applied: the last contiguous ``line_seq``. It stands still at a gap, and the client sends again from behind it, in
    order; messages beyond a gap are not kept, because they all come again.
    """

    def __init__(self) -> None:
        self.applied = 0

    def accept(self, line_seq: int) -> Arrival:
        """Judge one message; only ``NEXT`` may be acted on, and it has raised ``applied``."""
        if line_seq == self.applied + 1:
            self.applied = line_seq
            return Arrival.NEXT
        return Arrival.DUPLICATE if line_seq <= self.applied else Arrival.GAP
