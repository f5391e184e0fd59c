"""Structured output: masks that keep outputs within a grammar, from llguidance's matchers.

A grammar compiles in a thread while the first forward pass of its sequence runs. A matcher follows each sequence and
gives, before every draw, the tokens that the grammar allows next.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from engine.config.engine_config import ModelConfig
from engine.interfaces.plan import Sample, SequenceState
from engine.model.export import export
from engine.model.model_info import ModelInfo
from engine.model.names import ResolvedModel, resolve_model
from engine.model.tokenizer_files import TOKENIZER_FILE, ExportSpec, tokenizer_folder
from engine.wire.errors import StartupError
from engine.wire.messages import ErrorKind

COMPILE_TIMEOUT_S = 2.0

_LOGGER = logging.getLogger(__name__)
_MAX_COMPILED = 64
_MAX_REASON = 300
_SILENT = 0
"""llguidance's log level: what is wrong with a grammar goes to its user, not to this process's output."""

_TOKENIZER_SOURCES = ("tokenizer*", "vocab*", "*.model")


class Grammars:
    """Compiles grammars, follows each sequence through its own, and masks the tokens that cannot come next.

    A matcher is kept while its sequence lives and has consumed the first of its output tokens; those it lacks it reads
    from the sequence. So it is right after a preemption, and on another engine it begins with the output so far.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, num_threads: int) -> None:
        """Use this tokenizer; tokens it does not know are never allowed. num_threads: for the masks of a batch."""
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

    def apply(self, logits: torch.Tensor, sequences: Sequence[SequenceState]) -> dict[int, Sample]:
        """Forbid in float32 ``logits`` [num_sequences, vocabulary], in place, what grammars do not allow.

        Returns failed samples for the rows whose grammar cannot go on.
        """
        constrained = [(row, s) for row, s in enumerate(sequences) if s.sampling.grammar is not None]
        if not constrained:
            return {}
        self.prepare(sequence for _, sequence in constrained)
        matchers = [self._progress[sequence].matcher(sequence) for _, sequence in constrained]
        mask = allocate_token_bitmask(len(constrained), self._mask_bits)
        usable = [(matcher, index) for index, matcher in enumerate(matchers) if matcher and not matcher.is_error()]
        fill_next_token_bitmask_par(self._executor, usable, mask)
        # numpy unpacks 32 rows in 0.3 ms, torch in 40; what the model has and the tokenizer lacks becomes zero
        allowed = np.unpackbits(mask.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little").view(np.bool_)
        _forbid(logits, [row for row, _ in constrained], ~torch.from_numpy(allowed).to(logits.device))
        failures = {row: _failure(matcher) for (row, _), matcher in zip(constrained, matchers, strict=True)}
        return {row: failure for row, failure in failures.items() if failure is not None}


class _Progress:
    """The position of one sequence in its grammar."""

    def __init__(self, compilation: "Compilation") -> None:
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


def _forbid(logits: torch.Tensor, rows: list[int], forbidden: torch.Tensor) -> None:
    """Set to minus infinity, in some rows of ``logits``, what ``forbidden`` [len(rows), vocabulary] marks."""
    if len(rows) == len(logits):  # saves two copies
        logits.masked_fill_(forbidden, -torch.inf)
        return
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)


def _failure(matcher: LLMatcher | None) -> Sample | None:
    """Return why a sequence cannot go on, if it cannot; what llguidance adds about its state is left out."""
    if matcher is None:
        return _failed("response_format: the grammar takes too long to compile")
    if not matcher.is_error():
        return None
    reason = " ".join(matcher.get_error().split("\n<state>")[0].split())[:_MAX_REASON]
    return _failed(f"response_format: the grammar cannot be matched: {reason}")


def _failed(reason: str) -> Sample:
    return Sample(0, reason, error_kind=ErrorKind.REQUEST)


# --- compiling --------------------------------------------------------------------------------------------------------


class Compilation:
    """One grammar on its way to a matcher, in a thread of its own without the interpreter's lock.

    Most take a millisecond, large ones a tenth of a second, and a few combinations of patterns practically for ever.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._done = threading.Event()
        self._matcher: LLMatcher | None = None  # written by the thread, read when ``_done`` is set or time is over
        # A thread inside the library cannot be stopped; being a daemon it does not keep the process from ending.
        threading.Thread(target=self._run, args=(tokenizer, grammar), name="grammar", daemon=True).start()

    def result(self) -> LLMatcher | None:
        """Return the matcher at its beginning, only to be copied; None when the time is over."""
        self._done.wait(max(0.0, self._deadline - time.monotonic()))
        return self._matcher

    def _run(self, tokenizer: LLTokenizer, grammar: str) -> None:
        self._matcher = LLMatcher(tokenizer, grammar, log_level=_SILENT)  # never raises; holds what is wrong
        self._done.set()


class GrammarCompiler:
    """Compiles each grammar once, as long as it is among the latest."""

    def __init__(self, tokenizer: LLTokenizer, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        """Prepare. timeout_s: after so long a sequence waits for its grammar no more."""
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._latest: OrderedDict[str, Compilation] = OrderedDict()

    def compile(self, grammar: str) -> Compilation:
        """Begin, or return what was begun for the same grammar."""
        compilation = self._latest.pop(grammar, None) or Compilation(self._tokenizer, grammar, self._timeout_s)
        self._latest[grammar] = compilation
        if len(self._latest) > _MAX_COMPILED:
            self._latest.popitem(last=False)
        return compilation


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def load_grammars(config: ModelConfig, info: ModelInfo) -> Grammars | None:
    """Return the grammars of a model, or None, with the reason in the log, when its tokens cannot be matched."""
    if not info.eos_token_ids:
        _LOGGER.warning("no structured output: the model names no end-of-sequence token to end it with")
        return None
    try:
        text = (_folder(config) / TOKENIZER_FILE).read_text(encoding="utf-8")
        tokenizer = LLTokenizer(text, eos_token=list(info.eos_token_ids))
    except (StartupError, OSError, ValueError) as error:
        _LOGGER.warning("no structured output: %s", error)
        return None
    return Grammars(tokenizer, info.vocab_size, config.num_threads)


def _folder(config: ModelConfig) -> Path:
    """Return the folder of the tokenizer, exported now if no other process of this machine has done it yet.

    Raises:
        StartupError: the model has no tokenizer that can be exported.
    """
    resolved = resolve_model(config.model, config.gguf_file)
    folder = tokenizer_folder(resolved)
    if folder is not None:
        return folder
    if not _has_tokenizer(resolved):
        raise StartupError(f"there is no tokenizer in {resolved.path}")
    return Path(export(ExportSpec(model=config.model, gguf_file=config.gguf_file)).tokenizer_dir)


def _has_tokenizer(model: ResolvedModel) -> bool:
    """Tell whether an export may succeed: a look into the folder is quick, the library's attempt is not."""
    if not model.is_local or model.gguf_file is not None:
        return True
    return any(next(Path(model.path).glob(pattern), None) is not None for pattern in _TOKENIZER_SOURCES)
