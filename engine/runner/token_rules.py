"""Rules for single tokens that requests set: penalties, biases and bans, as edits of a batch's logits.

Rows without rules cost nothing. What is computed per sequence is kept while the sequence lives, whether it runs or
waits, and follows from its tokens alone: after a preemption it still holds, and another engine computes the same.
"""

from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.interfaces.plan import SequenceState
from engine.runner.logit_edits import LogitEdits
from engine.wire.sampling import SamplingParams

_MIN_CAPACITY = 64


class TokenRules:
    """Applies the rules of every sequence in a batch. ``len`` tells for how many sequences something is kept."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._rules: WeakKeyDictionary[SequenceState, _SequenceRules] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._rules)

    def apply(self, logits: torch.Tensor, sequences: Sequence[SequenceState]) -> None:
        """Change the rows of float32 ``logits`` [num_sequences, vocabulary] whose sequences have rules, in place."""
        edits: LogitEdits | None = None
        for row, sequence in enumerate(sequences):
            if _has_rules(sequence.sampling):
                edits = edits or LogitEdits(logits.shape[1])
                self._of(sequence).collect(row, sequence, edits)
        if edits is not None:
            edits.apply(logits)

    def _of(self, sequence: SequenceState) -> "_SequenceRules":
        rules = self._rules.get(sequence)
        if rules is None:
            rules = self._rules[sequence] = _SequenceRules(sequence, self._eos_token_ids)
        return rules


def _has_rules(sampling: SamplingParams) -> bool:
    return bool(
        sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or sampling.bad_words
        or sampling.allowed_token_ids
    )


class _SequenceRules:
    def __init__(self, sequence: SequenceState, eos_token_ids: frozenset[int]) -> None:
        sampling = sequence.sampling
        self._end_tokens = _ids(sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}))
        self._repetition = sampling.repetition_penalty
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._counts: TokenCounts | None = None  # only where something is penalised
        if self._repetition != 1.0 or self._presence or self._frequency:
            # The tokens of a prompt of embeddings are placeholders, which nobody repeats.
            with_prompt = self._repetition != 1.0 and sequence.prompt_embeds is None
            self._counts = TokenCounts(sequence, with_prompt=with_prompt)
        self._biased = _ids(list(sampling.logit_bias))
        self._biases = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self._allowed = _ids(list(dict.fromkeys(sampling.allowed_token_ids)))
        self._bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None

    def collect(self, row: int, sequence: SequenceState, edits: LogitEdits) -> None:
        """Add the edits for the next token of the sequence, at that row."""
        if self._counts is not None:
            self._counts.update(sequence)
            self._penalise(row, self._counts, edits)
        if len(self._biased):
            edits.bias(row, self._biased, self._biases)
        if len(self._allowed):
            edits.allow_only(row, self._allowed)
        if self._bad_words is not None:
            edits.forbid(row, self._bad_words.forbidden(sequence.token_ids, sequence.num_prompt_tokens))
        if sequence.num_output_tokens < sequence.sampling.min_tokens:
            edits.forbid(row, self._end_tokens)

    def _penalise(self, row: int, counts: "TokenCounts", edits: LogitEdits) -> None:
        if self._repetition != 1.0:
            edits.divide(row, counts.ids, self._repetition)
        if self._presence or self._frequency:
            penalties = self._frequency * counts.counts + self._presence * (counts.counts > 0)
            edits.penalise(row, counts.ids, penalties.astype(np.float32))


class TokenCounts:
    """Distinct tokens of one sequence with their number of times in the output.

    A new sequence is counted whole, whatever it went through before: preempted here, or begun elsewhere. From then on
    each new token costs one look-up.
    """

    def __init__(self, sequence: SequenceState, *, with_prompt: bool) -> None:
        """Count. with_prompt: tokens of the prompt are there too, with zero times unless the output repeats them."""
        start = sequence.num_prompt_tokens
        output, counts = np.unique(np.array(sequence.token_ids[start:], dtype=np.int64), return_counts=True)
        prompt = np.unique(np.array(sequence.token_ids[:start] if with_prompt else [], dtype=np.int64))
        unrepeated = np.setdiff1d(prompt, output, assume_unique=True)
        distinct = [*output.tolist(), *unrepeated.tolist()]
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        # Arrays with room to grow: they are scattered to the device as they are, every step.
        capacity = max(_MIN_CAPACITY, 2 * len(distinct))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._ids[: len(distinct)] = distinct
        self._counts[: len(output)] = counts
        self._num_counted = len(sequence.token_ids)

    def update(self, sequence: SequenceState) -> None:
        """Count the tokens that were appended since."""
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


class BadWords:
    """Token sequences that must not be completed in the output of one request.

    The last token of a word is forbidden behind the others, so words are kept by the length of what comes before it.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """Prepare. words: token ids of each, not empty."""
        self._last: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for *beginning, last in dict.fromkeys(words):
            self._last[len(beginning)][tuple(beginning)].append(last)

    def forbidden(self, token_ids: list[int], num_prompt_tokens: int) -> NDArray[np.int64]:
        """Return the tokens that would complete one; the beginning of a word counts only where it is output."""
        num_output = len(token_ids) - num_prompt_tokens
        found: set[int] = set()
        for length, last in self._last.items():
            if length <= num_output:
                found.update(last.get(tuple(token_ids[len(token_ids) - length :]), ()))
        return np.fromiter(found, dtype=np.int64, count=len(found))


def _ids(token_ids: list[int]) -> NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)
