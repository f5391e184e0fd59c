"""Keeps outputs within a grammar: masks of allowed tokens, from llguidance's matchers."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from engine.scheduler.plan import SequenceState

_MAX_COMPILED = 64
_MAX_REASON = 300
_SILENT = 0
"""llguidance's log level: what is wrong with a grammar goes to its user, not to this process's output."""


class Grammars:
    """Compiles grammars, follows each sequence through its own, and masks what it may not say next.

    A matcher is kept while its sequence lives and has consumed the first of its output tokens; what it lacks it reads
    from the sequence. So it is right after a preemption, and on another engine it begins with the output so far.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, num_threads: int) -> None:
        """Use this tokenizer; of tokens it does not know none is ever allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._executor = LLExecutor(num_threads)
        # A complex grammar takes up to a second; the first forward pass runs meanwhile.
        self._compiler = ThreadPoolExecutor(1, "grammar")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._progress: WeakKeyDictionary[SequenceState, _Progress] = WeakKeyDictionary()

    def prepare(self, sequences: Iterable[SequenceState]) -> None:
        """Begin to compile the grammars of sequences that are new here."""
        for sequence in sequences:
            grammar = sequence.sampling.grammar
            if grammar is not None and sequence not in self._progress:
                self._progress[sequence] = _Progress(self._compile(grammar))

    def apply(self, scores: torch.Tensor, sequences: Sequence[SequenceState]) -> dict[int, str]:
        """Forbid in float32 ``scores`` [num_sequences, vocabulary], in place, what grammars do not allow.

        Returns the rows whose grammar cannot go on, with one sentence each.
        """
        asked = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.sampling.grammar is not None]
        if not asked:
            return {}
        self.prepare(sequence for _, sequence in asked)
        matchers = [self._progress[sequence].matcher(sequence) for _, sequence in asked]
        mask = allocate_token_bitmask(len(asked), self._tokenizer.vocab_size)
        usable = [(matcher, index) for index, matcher in enumerate(matchers) if not matcher.is_error()]
        fill_next_token_bitmask_par(self._executor, usable, mask)
        # numpy unpacks 32 rows in 0.3 ms, torch in 40; what the model has and the tokenizer lacks becomes zero
        allowed = np.unpackbits(mask.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little").view(np.bool_)
        index = torch.tensor([row for row, _ in asked], device=scores.device)
        scores[index] = scores[index].masked_fill_(~torch.from_numpy(allowed).to(scores.device), -torch.inf)
        return {row: _fault(m) for (row, _), m in zip(asked, matchers, strict=True) if m.is_error()}

    def close(self) -> None:
        """Stop compiling; idempotent."""
        self._compiler.shutdown(cancel_futures=True)

    def _compile(self, grammar: str) -> "Future[LLMatcher]":
        """Return the matcher of a grammar at its beginning, never to be used itself."""
        found = self._compiled.pop(grammar, None)
        if found is None:
            found = self._compiler.submit(LLMatcher, self._tokenizer, grammar, log_level=_SILENT)
        self._compiled[grammar] = found
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return found


class _Progress:
    """Where one sequence is in its grammar."""

    def __init__(self, beginning: "Future[LLMatcher]") -> None:
        self._beginning = beginning
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0

    def matcher(self, sequence: SequenceState) -> LLMatcher:
        """Return the matcher behind all output tokens so far; it is in error when they do not match."""
        if self._matcher is None:
            self._matcher = self._beginning.result().deep_copy()
        fresh = sequence.token_ids[sequence.num_prompt_tokens + self._num_consumed :]
        self._matcher.consume_tokens(fresh)
        self._num_consumed += len(fresh)
        return self._matcher


def _fault(matcher: LLMatcher) -> str:
    """Return why a matcher cannot go on; what llguidance adds about its state is left out."""
    reason = matcher.get_error().split("\n<state>")[0].strip()[:_MAX_REASON]
    return f"response_format: the grammar cannot be matched: {reason}"
