"""The receiving end of one numbered request channel."""

from enum import Enum


class SequenceCheck(Enum):
    """What a number says about its message."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    GAP = "gap"


class SequencedChannel:
    """Counts one client's messages to this engine; pure.

    applied: the last contiguous ``channel_seq``. It stands still at a gap, and the client sends again from behind it,
    in order; messages beyond a gap are not kept, because they all come again.
    """

    def __init__(self) -> None:
        self.applied = 0

    def accept(self, channel_seq: int) -> SequenceCheck:
        """Judge one message; only ``NEXT`` may be acted on, and it has raised ``applied``."""
        if channel_seq == self.applied + 1:
            self.applied = channel_seq
            return SequenceCheck.NEXT
        return SequenceCheck.DUPLICATE if channel_seq <= self.applied else SequenceCheck.GAP
