"""Log-probabilities of drawn tokens and of prompts, from the logits as the model gave them."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.interfaces.plan import ScheduledChunk, SequenceState, StepPlan
from engine.wire.logprobs import Logprobs

_ROWS_AT_ONCE = 64
"""Prompt rows turned to float32 together: a whole prompt's would need gigabytes with a large vocabulary."""


class RawLogits:
    """A copy of the rows whose log-probabilities are requested, from before token rules and grammars change them."""

    def __init__(self, logits: torch.Tensor, requests: Sequence[tuple[int, int]]) -> None:
        """Copy rows of float32 ``logits`` [R, vocabulary]. requests: (row, number of best tokens) of each."""
        self._requests = requests
        self._index = torch.tensor([row for row, _ in requests], device=logits.device)
        self._logits = logits[self._index]

    @classmethod
    def keep(cls, logits: torch.Tensor, sequences: Sequence[SequenceState]) -> "RawLogits | None":
        """Copy the rows of sequences that request log-probabilities; None when none does."""
        numbers = [(row, s.sampling.num_logprobs) for row, s in enumerate(sequences)]
        requests = [(row, num_top) for row, num_top in numbers if num_top is not None]
        return cls(logits, requests) if requests else None

    def logprobs_of(self, tokens: torch.Tensor) -> dict[int, Logprobs]:
        """Return row -> log-probabilities, for the tokens [R] that were drawn."""
        table = _Table.of(self._logits, tokens[self._index], max(num_top for _, num_top in self._requests))
        return {
            row: table.pack(slice(index, index + 1), num_top) for index, (row, num_top) in enumerate(self._requests)
        }


class PromptLogprobs:
    """Collects the log-probabilities of prompts while their chunks run.

    Kept by position, so a chunk that runs again, after a preemption or because its plan was dropped, changes nothing.
    """

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[SequenceState, _Table] = WeakKeyDictionary()

    def record(self, logits: torch.Tensor, plan: StepPlan) -> None:
        """Take the logits [num_positions, vocabulary] of every ``prompt_logprob_positions`` of the plan, in order."""
        first = 0
        for chunk in plan.chunks:
            if chunk.sequence.awaits_prompt_logprobs:
                positions = prompt_logprob_positions(chunk)
                self._record(chunk.sequence, positions, logits[first : first + len(positions)])
                first += len(positions)
        assert first == len(logits), "the batch kept other positions"

    def take(self, sequence: SequenceState) -> Logprobs | None:
        """Return what goes out with the next token of a sequence that samples."""
        if sequence.sampling.num_prompt_logprobs is None:
            return None
        if sequence.awaits_prompt_logprobs:
            # Kept: the step may still be dropped, and then they go out with the next token drawn.
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
            rows = logits[start : start + _ROWS_AT_ONCE].float()
            table.set(slice(some.start, some.stop), _Table.of(rows, next_tokens, table.num_top))


def prompt_logprob_positions(chunk: ScheduledChunk) -> range:
    """Return the positions of a chunk whose logits give the log-probability of a prompt token: the one behind each."""
    if not chunk.sequence.awaits_prompt_logprobs:
        return range(0)
    return range(chunk.start, min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt_tokens - 1))


class _Table:
    """Log-probabilities of n rows on the host, little-endian as they travel.

    chosen: [n], of one token each. ids, values: [n, num_top], the best tokens and their log-probabilities, best first.
    """

    def __init__(self, chosen: NDArray[np.float32], ids: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        self._chosen, self._ids, self._values = chosen, ids, values

    @classmethod
    def empty(cls, num_rows: int, num_top: int) -> "_Table":
        shape = num_rows, num_top
        return cls(np.zeros(num_rows, "<f4"), np.zeros(shape, "<i4"), np.zeros(shape, "<f4"))

    @classmethod
    def of(cls, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> "_Table":
        """Compute the rows of float32 ``logits`` [n, vocabulary] for ``tokens`` [n]."""
        # Only what is sent is normalised: a log-softmax would write the whole vocabulary once more.
        total = logits.logsumexp(dim=-1, keepdim=True)
        chosen = logits.gather(1, tokens[:, None]) - total
        best, ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
        values = torch.cat([chosen, best - total], dim=1).cpu().numpy().astype("<f4", copy=False)
        return cls(values[:, 0], ids.cpu().numpy().astype("<i4"), values[:, 1:])

    @property
    def num_top(self) -> int:
        return int(self._ids.shape[1])

    def set(self, rows: slice, other: "_Table") -> None:
        self._chosen[rows], self._ids[rows], self._values[rows] = other._chosen, other._ids, other._values

    def pack(self, rows: slice, num_top: int) -> Logprobs:
        """Return some rows as they travel, with that many of the best tokens, or all when there are fewer."""
        num_top = min(num_top, self.num_top)
        return Logprobs(
            num_top,
            self._chosen[rows].tobytes(),
            self._ids[rows, :num_top].tobytes(),
            self._values[rows, :num_top].tobytes(),
        )
