"""What an output must match, as callers say it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

MAX_GRAMMAR_CHARACTERS = 256 * 1024

TIMEOUT_S = 1.0
"""What a grammar may take to compile."""


class GrammarKind(StrEnum):
    """How a grammar is written: JSON schema (draft 2020-12), Rust regular expression, or Lark."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


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


class Question(Struct):
    """A grammar to try, as it travels to the process that does it."""

    kind: GrammarKind
    source: str


class Answer(Struct):
    """grammar: the form engines take; empty when ``error`` says in one sentence what is wrong."""

    grammar: str = ""
    error: str = ""
