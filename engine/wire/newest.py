"""The rule of states that are published whole and repeated: the newest wins. Pure."""


class NewestState:
    """A filter of the coordinator's states: it lets one through when it is newer than all before.

    Each coordinator of a deployment has a higher generation than the one before, and numbers its states from 1. So a
    restarted coordinator is believed, and what a predecessor still had on its way is not.
    """

    __slots__ = ("_newest",)

    def __init__(self) -> None:
        self._newest = (-1, -1)

    @property
    def is_heard(self) -> bool:
        """Tell whether any state was let through."""
        return self._newest >= (0, 0)

    def accept(self, generation: int, seq: int) -> bool:
        """Tell whether this state is newer than all before it; if so, it is the newest from now on."""
        if (generation, seq) <= self._newest:
            return False
        self._newest = (generation, seq)
        return True
