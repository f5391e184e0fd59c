"""``response_format``: what the whole answer must look like."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from orchestrator.api.fields import NonEmpty, Strict
from orchestrator.llm.grammar import Grammar

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_PARTS = ("json_schema", "regex", "grammar")


class NamedSchema(Strict):
    """OpenAI's wrapping of a JSON schema. Every schema is followed strictly, whatever ``strict`` says."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's three types, and ``regex`` and ``grammar`` (Lark), each with the field of its own name."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: NamedSchema | None = None
    regex: NonEmpty | None = None
    grammar: NonEmpty | None = None

    @model_validator(mode="after")
    def _has_its_own_part_and_no_other(self) -> Self:
        for part in _PARTS:
            if (getattr(self, part) is not None) != (part == self.type):
                raise ValueError(f"{part} must be given when type is {part!r}, and only then")
        return self

    def to_grammar(self) -> Grammar | None:
        """Return what the answer must match; None for any text."""
        match self.type:
            case "json_object":
                return Grammar.json_schema(_ANY_OBJECT)
            case "json_schema":
                assert self.json_schema is not None, "validated"
                return Grammar.json_schema(self.json_schema.schema_)
            case "regex":
                return Grammar.regex(self.regex or "")
            case "grammar":
                return Grammar.lark(self.grammar or "")
        return None
