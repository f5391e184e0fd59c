"""Which tokens a sequence holds and how often its output repeats each; grows with the sequence, token by token."""

import numpy as np
from numpy.typing import NDArray

from engine.interfaces.plan import SequenceState

_FIRST_CAPACITY = 64


class TokenCounts:
    """Distinct tokens of one sequence with their number of times in the output.

    The first sight of a sequence counts all it holds, whatever it went through before: preempted here, or begun
    elsewhere. From then on each new token costs one look-up.
    """

    def __init__(self, sequence: SequenceState, *, with_prompt: bool) -> None:
        """Count. with_prompt: tokens of the prompt are there too, with zero times unless the output repeats them."""
        start = sequence.num_prompt_tokens
        output, counts = np.unique(np.array(sequence.token_ids[start:], dtype=np.int64), return_counts=True)
        prompt = np.unique(np.array(sequence.token_ids[:start] if with_prompt else [], dtype=np.int64))
        unrepeated = np.setdiff1d(prompt, output, assume_unique=True)
        distinct = [*output.tolist(), *unrepeated.tolist()]
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        capacity = max(_FIRST_CAPACITY, 2 * len(distinct))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._ids[: len(distinct)] = distinct
        self._counts[: len(output)] = counts
        self._num_counted = len(sequence.token_ids)

    def update(self, sequence: SequenceState) -> None:
        """Count what has joined since."""
        for token in sequence.token_ids[self._num_counted :]:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._add(token)
            self._counts[slot] += 1
        self._num_counted = len(sequence.token_ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return the distinct tokens; the array may change with the next ``update``."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Return how often each of ``ids`` is in the output; the array may change with the next ``update``."""
        return self._counts[: len(self._slots)]

    def _add(self, token: int) -> int:
        slot = len(self._slots)
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._slots[token] = slot
        self._ids[slot] = token
        return slot
