"""The process that tries grammars: ``python -m orchestrator.llm.grammar_worker``, one JSON line in, one out.

A grammar is a small program from outside. Compiling one may take practically for ever, or break the compiler, and
neither can be stopped inside a process that has other things to do. This one has none: when its time for a grammar is
over, the kernel ends it.

The messages of the two processes are defined here, so that the worker imports nothing else of the server (25 MB); the
compiler is imported by the functions that need it, so that the API process, which knows the messages, does not load it.
"""

import resource
import signal
import sys
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

TIMEOUT_S = 1.0
"""What a grammar may take to compile."""

_MEMORY_BYTES = 1 << 30
_MAX_REASON = 300

# JSON may hold any amount of white space between its tokens, and small models fill their whole answer with it.
_WHITESPACE: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}


class GrammarKind(StrEnum):
    """How a grammar is written: JSON schema (draft 2020-12), Rust regular expression, or Lark."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Question(Struct):
    """A grammar to try."""

    kind: GrammarKind
    source: str


class Answer(Struct):
    """grammar: the form engines take; empty when ``error`` says in one sentence what is wrong."""

    grammar: str = ""
    error: str = ""


def try_grammar(kind: GrammarKind, source: str) -> Answer:
    """Translate a grammar and compile it, without a tokenizer."""
    from llguidance import LLMatcher

    try:
        grammar = _translate(kind, source)
    except ValueError as error:
        return Answer(error=_one_line(str(error)))
    reason = LLMatcher.validate_grammar(grammar)
    return Answer(error=_one_line(reason)) if reason else Answer(grammar)


def main() -> None:
    """Answer until standard input ends."""
    import llguidance  # noqa: F401 - before the first timer runs: loading it must not count as compiling

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
    from llguidance import LLMatcher

    match kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(source, defaults=_WHITESPACE)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(source)


if __name__ == "__main__":
    main()
