"""The sequences that wait to run: best rank first, then first come, first served."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.interfaces.plan import SequenceState

Rank = tuple[bool, int]


def rank(sequence: SequenceState) -> Rank:
    """Return what decides between sequences before their arrival does: lower is better."""
    return not sequence.is_promoted, sequence.priority


def order(sequence: SequenceState) -> tuple[bool, int, int]:
    """Return the sort key of a sequence: lower runs earlier, the highest is preempted first."""
    return not sequence.is_promoted, sequence.priority, sequence.arrival


class WaitingQueue:
    """A list kept sorted by ``order``; a preempted sequence comes back to the place its arrival gives it.

    A sorted list beats a heap here: an abort takes a sequence out of the middle, and moving 10,000 pointers costs 2 us.
    """

    def __init__(self) -> None:
        self._sequences: list[SequenceState] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._sequences)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of everybody here, that is what must be computed before each has its next token."""
        return self._num_tokens

    def first(self) -> SequenceState | None:
        """Return the sequence that runs next."""
        return self._sequences[0] if self._sequences else None

    def at(self, place: int) -> SequenceState | None:
        """Return the sequence that runs after ``place`` others."""
        return self._sequences[place] if place < len(self._sequences) else None

    def push(self, sequence: SequenceState) -> None:
        """Let a sequence wait; neither its tokens nor its rank may change until it leaves."""
        insort(self._sequences, sequence, key=order)
        self._num_tokens += len(sequence.token_ids)

    def remove(self, sequence: SequenceState) -> None:
        """Take a waiting sequence out, wherever it stands."""
        index = bisect_left(self._sequences, order(sequence), key=order)
        assert self._sequences[index] is sequence, "the sequence does not wait here"
        del self._sequences[index]
        self._num_tokens -= len(sequence.token_ids)
