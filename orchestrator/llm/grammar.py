"""Grammars that an output must match: as callers write them, and the checker that has them compiled before they travel.

Compiling happens in a process of its own (``grammar_worker.py``): it may take practically for ever, and native code
cannot be interrupted in a thread.
"""

import asyncio
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.wire.errors import InvalidRequestError
from engine.wire.process import child_environment
from orchestrator.llm.grammar_worker import TIMEOUT_S, Answer, GrammarKind, Question

MAX_GRAMMAR_CHARACTERS = 256 * 1024

_MAX_KEPT = 256


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as its caller wrote it.

    source: JSON text of the schema, the expression, or Lark rules with a ``start``. field: the request field it came
    in, for errors.
    """

    kind: GrammarKind
    source: str
    field: str = "response_format"

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, field: str = "response_format") -> "Grammar":
        """Ask for JSON that is valid under a schema; ``{}`` and ``{"type": "object"}`` ask for any value or object."""
        return cls(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), field)

    @classmethod
    def regex(cls, expression: str, field: str = "response_format") -> "Grammar":
        """Ask for a text that an expression matches from end to end."""
        return cls(GrammarKind.REGEX, expression, field)

    @classmethod
    def lark(cls, rules: str, field: str = "response_format") -> "Grammar":
        """Ask for a text that the rule ``start`` of a Lark grammar matches."""
        return cls(GrammarKind.LARK, rules, field)

    @property
    def key(self) -> tuple[str, str]:
        """Return what two grammars have in common that ask for the same."""
        return self.kind, self.source


class GrammarChecker:
    """Asks a process of its own, which is started by the first grammar and again when one was the end of it.

    One grammar is tried at a time, in a thread that waits for the process; what was asked lately is known.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-check")
        self._worker: subprocess.Popen[bytes] | None = None  # touched in the thread alone, but for ``aclose``
        self._known: OrderedDict[tuple[str, str], Answer] = OrderedDict()
        self._answers = msgspec.json.Decoder(Answer)

    async def check(self, grammar: Grammar) -> str:
        """Return a grammar in the form engines take.

        Raises:
            InvalidRequestError: it is none, nothing can match it, or it is too large to try; with the reason.
        """
        if len(grammar.source) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequestError(
                f"{grammar.field}: the grammar has more than {MAX_GRAMMAR_CHARACTERS} characters", grammar.field
            )
        answer = self._known.pop(grammar.key, None)
        if answer is None:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._thread, self._ask, grammar)
        self._known[grammar.key] = answer
        if len(self._known) > _MAX_KEPT:
            self._known.popitem(last=False)
        if answer.error:
            raise InvalidRequestError(f"{grammar.field}: {answer.error}", grammar.field)
        return answer.grammar

    async def aclose(self) -> None:
        """End the process; idempotent."""
        worker = self._worker
        if worker is not None:
            worker.kill()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._reap)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, grammar: Grammar) -> Answer:
        worker = self._worker or self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(msgspec.json.encode(Question(grammar.kind, grammar.source)) + b"\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            return self._answers.decode(line)
        status = self._reap()
        if status == -signal.SIGALRM:
            return Answer(error=f"the grammar takes more than {TIMEOUT_S:g} s to compile")
        return Answer(error="the grammar is more than its compiler can bear")

    def _start(self) -> "subprocess.Popen[bytes]":
        # It needs no signal when this process dies: its input ends then, and its time for a grammar is bounded.
        self._worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "orchestrator.llm.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        return self._worker

    def _reap(self) -> int:
        """Wait for the end of the process and return its exit status."""
        worker, self._worker = self._worker, None
        if worker is None:
            return 0
        worker.communicate()
        return worker.returncode
