"""Keeps outputs within a grammar: masks of allowed tokens, from llguidance's matchers."""

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from engine.interfaces.plan import SequenceState
from engine.runner.fault import Fault
from engine.runner.grammar_compiler import Compilation, GrammarCompiler
from engine.wire.messages import ErrorKind

_MAX_REASON = 300


class Grammars:
    """Compiles grammars, follows each sequence through its own, and masks what it may not say next.

    A matcher is kept while its sequence lives and has consumed the first of its output tokens; what it lacks it reads
    from the sequence. So it is right after a preemption, and on another engine it begins with the output so far.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, num_threads: int) -> None:
        """Use this tokenizer; of tokens it does not know none is ever allowed."""
        self._compiler = GrammarCompiler(tokenizer)
        self._mask_bits = tokenizer.vocab_size
        self._vocab_size = vocab_size
        self._executor = LLExecutor(num_threads)
        self._progress: WeakKeyDictionary[SequenceState, _Progress] = WeakKeyDictionary()

    def prepare(self, sequences: Iterable[SequenceState]) -> None:
        """Begin to compile the grammars of sequences that are new here."""
        for sequence in sequences:
            grammar = sequence.sampling.grammar
            if grammar is not None and sequence not in self._progress:
                self._progress[sequence] = _Progress(self._compiler.compile(grammar))

    def apply(self, scores: torch.Tensor, sequences: Sequence[SequenceState]) -> dict[int, Fault]:
        """Forbid in float32 ``scores`` [num_sequences, vocabulary], in place, what grammars do not allow.

        Returns the rows whose grammar cannot go on, and why.
        """
        asked = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.sampling.grammar is not None]
        if not asked:
            return {}
        self.prepare(sequence for _, sequence in asked)
        matchers = [self._progress[sequence].matcher(sequence) for _, sequence in asked]
        mask = allocate_token_bitmask(len(asked), self._mask_bits)
        usable = [(matcher, index) for index, matcher in enumerate(matchers) if matcher and not matcher.is_error()]
        fill_next_token_bitmask_par(self._executor, usable, mask)
        # numpy unpacks 32 rows in 0.3 ms, torch in 40; what the model has and the tokenizer lacks becomes zero
        allowed = np.unpackbits(mask.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little").view(np.bool_)
        _forbid(scores, [row for row, _ in asked], ~torch.from_numpy(allowed).to(scores.device))
        faults = {row: _fault(matcher) for (row, _), matcher in zip(asked, matchers, strict=True)}
        return {row: fault for row, fault in faults.items() if fault is not None}


class _Progress:
    """Where one sequence is in its grammar."""

    def __init__(self, compilation: Compilation) -> None:
        self._compilation = compilation
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0

    def matcher(self, sequence: SequenceState) -> LLMatcher | None:
        """Return the matcher behind all output tokens so far; it is in error when they do not match.

        None when the grammar takes too long to compile.
        """
        if self._matcher is None:
            beginning = self._compilation.result()
            if beginning is None:
                return None
            self._matcher = beginning.deep_copy()
        fresh = sequence.token_ids[sequence.num_prompt_tokens + self._num_consumed :]
        self._matcher.consume_tokens(fresh)
        self._num_consumed += len(fresh)
        return self._matcher


def _forbid(scores: torch.Tensor, rows: list[int], forbidden: torch.Tensor) -> None:
    """Set to minus infinity, in some rows of ``scores``, what ``forbidden`` [len(rows), vocabulary] says."""
    if len(rows) == len(scores):  # saves two copies
        scores.masked_fill_(forbidden, -torch.inf)
        return
    index = torch.tensor(rows, device=scores.device)
    scores[index] = scores[index].masked_fill_(forbidden, -torch.inf)


def _fault(matcher: LLMatcher | None) -> Fault | None:
    """Return why a sequence cannot go on; what llguidance adds about its state is left out."""
    if matcher is None:
        return Fault("response_format: the grammar takes too long to compile", ErrorKind.REQUEST)
    if not matcher.is_error():
        return None
    reason = " ".join(matcher.get_error().split("\n<state>")[0].split())[:_MAX_REASON]
    return Fault(f"response_format: the grammar cannot be matched: {reason}", ErrorKind.REQUEST)
