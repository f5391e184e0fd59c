"""Log-probabilities of drawn tokens and of prompts, from the scores as the model gave them."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.interfaces.plan import ScheduledChunk, SequenceState, StepPlan
from engine.wire.logprobs import Logprobs

_ROWS_AT_ONCE = 64
"""Prompt rows turned to float32 together: a whole prompt's would need gigabytes with a large vocabulary."""


class RawScores:
    """The rows of a step whose log-probabilities were asked for, kept before anything changes them."""

    def __init__(self, logits: torch.Tensor, sequences: Sequence[SequenceState]) -> None:
        """Copy what is needed of float32 ``logits`` [num_sequences, vocabulary]."""
        asked = [(row, s.sampling.num_logprobs) for row, s in enumerate(sequences)]
        self._wanted = [(row, num_top) for row, num_top in asked if num_top is not None]
        if self._wanted:
            self._index = torch.tensor([row for row, _ in self._wanted], device=logits.device)
            self._scores = logits[self._index]

    def of(self, tokens: torch.Tensor) -> dict[int, Logprobs]:
        """Return row -> log-probabilities, for the tokens [num_sequences] that were drawn."""
        if not self._wanted:
            return {}
        table = _Table.of(self._scores, tokens[self._index], max(num_top for _, num_top in self._wanted))
        return {row: table.pack(slice(index, index + 1), num_top) for index, (row, num_top) in enumerate(self._wanted)}


class PromptScores:
    """Collects the log-probabilities of prompts while their chunks run.

    Kept by position, so a chunk that runs again, after a preemption or because its plan was dropped, changes nothing.
    """

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[SequenceState, _Table] = WeakKeyDictionary()

    def record(self, logits: torch.Tensor, plan: StepPlan) -> None:
        """Take the scores [num_scored, vocabulary] of every position of the plan that ``scored_positions`` names."""
        first = 0
        for chunk in plan.chunks:
            if chunk.sequence.awaits_prompt_logprobs:
                positions = scored_positions(chunk)
                self._record(chunk.sequence, positions, logits[first : first + len(positions)])
                first += len(positions)
        assert first == len(logits), "the batch scored other positions"

    def take(self, sequence: SequenceState) -> Logprobs | None:
        """Return what goes out with the next token of a sequence that samples."""
        if sequence.sampling.num_prompt_logprobs is None:
            return None
        if sequence.awaits_prompt_logprobs:
            return self._tables[sequence].pack(slice(None), sequence.sampling.num_prompt_logprobs)
        self._tables.pop(sequence, None)  # the token they went out with was committed
        return None

    def _record(self, sequence: SequenceState, positions: range, logits: torch.Tensor) -> None:
        table = self._tables.get(sequence)
        if table is None:
            num_top = sequence.sampling.num_prompt_logprobs or 0
            table = self._tables[sequence] = _Table.empty(sequence.num_prompt_tokens - 1, num_top)
        for start in range(0, len(positions), _ROWS_AT_ONCE):
            some = positions[start : start + _ROWS_AT_ONCE]
            next_tokens = torch.tensor(sequence.token_ids[some.start + 1 : some.stop + 1], device=logits.device)
            scores = logits[start : start + _ROWS_AT_ONCE].float()
            table.set(slice(some.start, some.stop), _Table.of(scores, next_tokens, table.num_top))


def scored_positions(chunk: ScheduledChunk) -> range:
    """Return the positions of a chunk whose scores tell the log-probability of a prompt token: the one behind each."""
    if not chunk.sequence.awaits_prompt_logprobs:
        return range(0)
    return range(chunk.start, min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt_tokens - 1))


class _Table:
    """Log-probabilities of some rows on the host: of one token each, and of the best ones."""

    def __init__(self, chosen: NDArray[np.float32], ids: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        self._chosen, self._ids, self._values = chosen, ids, values

    @classmethod
    def empty(cls, num_rows: int, num_top: int) -> "_Table":
        shape = num_rows, num_top
        return cls(np.zeros(num_rows, "<f4"), np.zeros(shape, "<i4"), np.zeros(shape, "<f4"))

    @classmethod
    def of(cls, scores: torch.Tensor, tokens: torch.Tensor, num_top: int) -> "_Table":
        """Work out the rows of float32 ``scores`` [n, vocabulary] for ``tokens`` [n]."""
        total = scores.logsumexp(dim=-1, keepdim=True)
        chosen = scores.gather(1, tokens[:, None]) - total
        best, ids = scores.topk(min(num_top, scores.shape[1]), dim=-1)
        values = torch.cat([chosen, best - total], dim=1).cpu().numpy().astype("<f4", copy=False)
        return cls(values[:, 0], ids.cpu().numpy().astype("<i4"), values[:, 1:])

    @property
    def num_top(self) -> int:
        return int(self._ids.shape[1])

    def set(self, rows: slice, other: "_Table") -> None:
        """Take over what another table of the same width says of these rows."""
        self._chosen[rows], self._ids[rows], self._values[rows] = other._chosen, other._ids, other._values

    def pack(self, rows: slice, num_top: int) -> Logprobs:
        """Return some rows as they travel, with that many of the best tokens, or fewer when there are not so many."""
        num_top = min(num_top, self.num_top)
        return Logprobs(
            num_top,
            self._chosen[rows].tobytes(),
            self._ids[rows, :num_top].tobytes(),
            self._values[rows, :num_top].tobytes(),
        )
