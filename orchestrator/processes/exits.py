"""The end of a process as plain data: its exit status, the reason in one sentence, its last lines. Pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from engine.wire.replicas import EndKind


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of one process, confirmed by whatever hosts it.

    returncode: as ``subprocess`` has it (negative: the signal); None when only the loss of its host is known.
    reason: one sentence for people. last_lines: the end of what it wrote to standard error. was_hung: it was killed
    because it made no progress.
    """

    returncode: int | None
    reason: str
    last_lines: tuple[str, ...] = ()
    was_hung: bool = False

    @property
    def kind(self) -> EndKind:
        """Return the kind of this end."""
        if self.was_hung:
            return EndKind.HUNG
        if self.returncode is None:
            return EndKind.LOST
        return EndKind.SIGNAL if self.returncode < 0 else EndKind.EXIT


def describe_exit(returncode: int, last_lines: Sequence[str]) -> str:
    """Return one sentence on how a process ended, with its last line where that can be the reason."""
    end = f"killed by {_signal_name(-returncode)}" if returncode < 0 else f"exit status {returncode}"
    last = next((line.strip() for line in reversed(last_lines) if line.strip()), "")
    # A process that is killed by SIGKILL writes nothing about it: its last line is about something else.
    return f"{end}: {last}" if last and returncode not in (0, -signal.SIGKILL) else end


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # real-time signals have no name
