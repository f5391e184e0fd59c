"""What a request asks of single tokens: penalties, biases, bans. Rows that ask for none cost nothing."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.interfaces.plan import SequenceState
from engine.runner.bad_words import BadWords
from engine.runner.edits import LogitEdits
from engine.runner.penalties import TokenCounts
from engine.wire.sampling import SamplingParams


class TokenRules:
    """Applies the rules of every sequence in a batch.

    What is worked out per sequence is kept while the sequence lives, whether it runs or waits, and follows from its
    tokens alone: after a preemption it is still true, and on another engine it comes out the same.
    """

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
        enders = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        self._enders = _ids(sorted(enders))
        self._repetition = sampling.repetition_penalty
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._counts: TokenCounts | None = None
        if self._repetition != 1.0 or self._presence or self._frequency:
            # The tokens of a prompt of embeddings are placeholders, which nobody repeats.
            with_prompt = self._repetition != 1.0 and sequence.prompt_embeds is None
            self._counts = TokenCounts(sequence, with_prompt=with_prompt)
        self._biased = _ids(list(sampling.logit_bias))
        self._biases = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self._allowed = _ids(list(dict.fromkeys(sampling.allowed_token_ids)))
        self._bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None

    def collect(self, row: int, sequence: SequenceState, edits: LogitEdits) -> None:
        """Note what the next token of the sequence, at that row, is subject to."""
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
            edits.forbid(row, self._enders)

    def _penalise(self, row: int, counts: TokenCounts, edits: LogitEdits) -> None:
        if self._repetition != 1.0:
            edits.divide(row, counts.ids, self._repetition)
        if self._presence or self._frequency:
            penalties = self._frequency * counts.counts + self._presence * (counts.counts > 0)
            edits.penalise(row, counts.ids, penalties.astype(np.float32))


def _ids(token_ids: list[int]) -> NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)
