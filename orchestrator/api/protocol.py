"""The OpenAI requests this server takes: every field checked, none silently ignored.

A field falls in one of four groups: it is honoured; it is a hint that changes no output (``user``, ``metadata`` ...);
it is known but not supported, and then accepted only with the value that asks for nothing (clients send those by
default); or it is unknown. The last two answer 400 with the field's name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core.core_schema import ValidationInfo

from orchestrator.llm.params import GenerationParams

MAX_CHOICES = 1024
"""Choices of one request at most: prompts x n."""

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for the older endpoint

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # what openai's own message objects carry when an answer is sent back as history
    "annotations": (None, []),
    "refusal": (None, ""),
    "tool_calls": (None, []),
    "tool_call_id": (None,),
    "reasoning_content": (None, ""),
}
"""Known but unsupported field -> the values that ask for nothing."""


def _ask_for_nothing(value: Any, info: ValidationInfo) -> Any:
    neutral = _NEUTRAL[str(info.field_name)]
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


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


Unsupported = Annotated[Any, AfterValidator(_ask_for_nothing)]
NonEmpty = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[list[NonEmpty], Field(max_length=16), BeforeValidator(_as_list)]
Text = Annotated[str | None, BeforeValidator(_join_text_parts)]
Prompts = Annotated[list[str | list[int]], PlainValidator(_as_prompts)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class StreamOptions(_Strict):
    """``include_usage`` adds one last chunk with the usage; ``include_obfuscation`` is a hint without effect here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(_Strict):
    """What both endpoints have in common; the meaning of each field is OpenAI's, or vLLM's where OpenAI has none."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    data_parallel_rank: Annotated[int, Field(ge=0)] | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    frequency_penalty: Unsupported = None
    logit_bias: Unsupported = None
    logprobs: Unsupported = None
    presence_penalty: Unsupported = None
    service_tier: Unsupported = None
    store: Unsupported = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Tell whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _params(
        self, max_tokens: int | None, default_max_tokens: int | None, data_parallel_rank: int | None
    ) -> GenerationParams:
        return GenerationParams(
            n=self.n or 1,
            max_tokens=max_tokens,
            default_max_tokens=default_max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            data_parallel_rank=data_parallel_rank,
        )


class ChatMessage(_Strict):
    """One message; ``content`` is a string or a list of text parts. ``developer`` is the newer name of ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text = None
    name: str | None = None

    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    reasoning_content: Unsupported = None
    refusal: Unsupported = None
    tool_call_id: Unsupported = None
    tool_calls: Unsupported = None

    @model_validator(mode="after")
    def _content_is_there(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is required when role is {self.role!r}")
        return self

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates know it."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content or ""}
        return message if self.name is None else message | {"name": self.name}


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    modalities: Unsupported = None
    parallel_tool_calls: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    response_format: Unsupported = None
    tool_choice: Unsupported = None
    tools: Unsupported = None
    top_logprobs: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    def to_params(self, data_parallel_rank: int | None) -> GenerationParams:
        """Return the parameters; ``max_completion_tokens`` is the newer name of ``max_tokens`` and wins."""
        return self._params(self.max_completion_tokens or self.max_tokens, None, data_parallel_rank)


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompts

    best_of: Unsupported = None
    echo: Unsupported = None
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _not_too_many_choices(self) -> Self:
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise ValueError(f"prompt holds {len(self.prompt)} prompts: prompts times n may be {MAX_CHOICES} at most")
        return self

    def to_params(self, data_parallel_rank: int | None) -> GenerationParams:
        """Return the parameters."""
        return self._params(self.max_tokens, _COMPLETION_MAX_TOKENS, data_parallel_rank)
