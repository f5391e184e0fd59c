"""The types of request fields, and how each is checked."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

from engine.wire.sampling import MAX_LOGPROBS
from orchestrator.llm.grammar import Grammar
from orchestrator.llm.limits import MAX_PRIORITY, MIN_PRIORITY

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # what openai's own message objects carry when a response is sent back as history
    "annotations": (None, []),
    "refusal": (None, ""),
    "tool_calls": (None, []),
    "tool_call_id": (None,),
    "reasoning_content": (None, ""),
}
"""Known but unsupported field -> the values that ask for nothing, which clients send by default."""


_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_FORMAT_FIELDS = ("json_schema", "regex", "grammar")  # of ``response_format``; each belongs to the type of its name


def _ask_for_nothing(value: Any, info: ValidationInfo) -> Any:
    neutral = _NEUTRAL[str(info.field_name)]
    # 1 == True in Python, but `"best_of": true` is a mistake
    if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in neutral):
        wanted = next((repr(choice) for choice in neutral if choice is not None), "null")
        raise ValueError(f"is not supported by this server; leave it out or send {wanted}")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _join_text_parts(value: Any) -> Any:
    """Return the text of a list of content parts; anything else is left to the field's own check."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f'part {index} ({kind!r}) is not of the form {{"type": "text", "text": ...}}')
        texts.append(part["text"])
    return "\n".join(texts)


def _as_prompts(value: Any) -> list[str | list[int]]:
    """Return a list of prompts, each a text or token ids, for any of OpenAI's four forms."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")


def _as_prompts_without_embeds(value: Any, info: ValidationInfo) -> list[str | list[int]]:
    """Return the prompts; none, where embeddings (a field before this one) take their place.

    OpenAI's own client insists on sending a prompt beside them. A validator of the whole request that runs first would
    do too, but pydantic then no longer knows that it reads JSON, where keys are always strings.
    """
    if not info.data.get("prompt_embeds"):
        return _as_prompts(value)
    if value not in (None, "", []):
        raise ValueError("prompt and prompt_embeds exclude each other; leave out one of the two")
    return []


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


Unsupported = Annotated[Any, AfterValidator(_ask_for_nothing)]
NonEmpty = Annotated[str, Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Field(max_length=16), BeforeValidator(_as_list)]
Text = Annotated[str | None, BeforeValidator(_join_text_parts)]
Prompts = Annotated[list[str | list[int]], PlainValidator(_as_prompts)]
PromptsWithoutEmbeds = Annotated[list[str | list[int]], PlainValidator(_as_prompts_without_embeds)]
EncodedEmbeds = Annotated[list[NonEmpty], Field(min_length=1), BeforeValidator(_as_list)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[dict[int, Bias], Field(max_length=1024)]
TokenIds = Annotated[list[int], Field(max_length=64)]
AllowedTokenIds = Annotated[list[int], Field(min_length=1, max_length=4096)]
BadWords = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=64)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Strict(BaseModel):
    """A part of a request: unknown fields are errors, and so is a number in quotes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class NamedSchema(Strict):
    """OpenAI's wrapping of a JSON schema. Every schema is followed strictly, whatever ``strict`` is."""

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
        for part in _FORMAT_FIELDS:
            if (getattr(self, part) is not None) != (part == self.type):
                raise ValueError(f"{part} must be given when type is {part!r}, and only then")
        return self

    def to_grammar(self) -> Grammar | None:
        """Return what the whole output must match; None for any text."""
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
