"""The process that tries grammars: ``python -m orchestrator.llm.grammar_worker``, one JSON line in, one out.

A grammar is a small program of a stranger. Compiling one may take practically for ever, or break the compiler, and
neither can be stopped inside a process that has other things to do. This one has none: when its time for a grammar is
over, the kernel ends it.
"""

import resource
import signal
import sys
from typing import Any

import msgspec
from llguidance import LLMatcher

from orchestrator.llm.grammar import TIMEOUT_S, Answer, GrammarKind, Question

_MEMORY_BYTES = 1 << 30
_MAX_REASON = 300

_WHITESPACE: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
"""JSON may hold any amount of white space, and small models fall in love with it."""


def try_grammar(kind: GrammarKind, source: str) -> Answer:
    """Translate a grammar and compile it, without a tokenizer."""
    try:
        grammar = _translate(kind, source)
    except ValueError as error:
        return Answer(error=_one_line(str(error)))
    reason = LLMatcher.validate_grammar(grammar)
    return Answer(error=_one_line(reason)) if reason else Answer(grammar)


def main() -> None:
    """Answer until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions = msgspec.json.Decoder(Question)
    for line in sys.stdin.buffer:
        question = questions.decode(line)
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)  # SIGALRM, whose default is the end
        answer = try_grammar(question.kind, question.source)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:_MAX_REASON]


def _translate(kind: GrammarKind, source: str) -> str:
    match kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(source, defaults=_WHITESPACE)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(source)


if __name__ == "__main__":
    main()
