"""Compiles grammars beside the steps, and gives one up that takes too long."""

import threading
import time
from collections import OrderedDict

from llguidance import LLMatcher, LLTokenizer

COMPILE_TIMEOUT_S = 2.0

_MAX_KEPT = 64
_SILENT = 0
"""llguidance's log level: what is wrong with a grammar goes to its user, not to this process's output."""


class Compilation:
    """One grammar on its way to a matcher.

    Runs in a thread of its own without the interpreter's lock: most take a millisecond, large ones a tenth of a second,
    and a few combinations of patterns practically for ever. Such a thread cannot be stopped; being a daemon it does not
    keep the process from ending.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._done = threading.Event()
        self._matcher: LLMatcher | None = None
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
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._latest: OrderedDict[str, Compilation] = OrderedDict()

    def compile(self, grammar: str) -> Compilation:
        """Begin, or return what was begun for the same grammar."""
        compilation = self._latest.pop(grammar, None) or Compilation(self._tokenizer, grammar, self._timeout_s)
        self._latest[grammar] = compilation
        if len(self._latest) > _MAX_KEPT:
            self._latest.popitem(last=False)
        return compilation
