"""The sequences that wait to run: best priority first, then first come, first served."""

from bisect import bisect_left, insort

from engine.scheduler.plan import SequenceState


def order(sequence: SequenceState) -> tuple[int, int]:
    """Return the sort key of a sequence: lower runs earlier, the highest is preempted first."""
    return sequence.priority, sequence.arrival


class WaitingQueue:
    """A list kept sorted by ``order``; a preempted sequence comes back to the place its arrival gives it.

    A sorted list beats a heap here: an abort takes a sequence out of the middle, and moving 10,000 pointers costs 2 us.
    """

    def __init__(self) -> None:
        self._sequences: list[SequenceState] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_tokens(self) -> int:
        """Return the tokens that must be computed before everybody here has its next token."""
        return self._num_tokens

    def first(self) -> SequenceState:
        """Return the sequence that runs next; the queue must not be empty."""
        return self._sequences[0]

    def push(self, sequence: SequenceState) -> None:
        """Let a sequence wait; its tokens must not change until it leaves."""
        insort(self._sequences, sequence, key=order)
        self._num_tokens += len(sequence.token_ids)

    def remove(self, sequence: SequenceState) -> None:
        """Take a waiting sequence out, wherever it stands."""
        index = bisect_left(self._sequences, order(sequence), key=order)
        assert self._sequences[index] is sequence, "the sequence does not wait here"
        del self._sequences[index]
        self._num_tokens -= len(sequence.token_ids)
