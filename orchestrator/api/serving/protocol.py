"""The requests of the generation endpoints: every field checked, none silently ignored.

A field falls in one of four groups: it is honoured; it is a hint that changes no output (``user``, ``metadata`` ...);
it is known but not supported, and then accepted only with the value that asks for nothing (clients send those by
default); or it is unknown. The last two answer 400 with the field's name.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from orchestrator.api.serving.fields import (
    AllowedTokenIds,
    BadWords,
    CacheSalt,
    EncodedEmbeds,
    LogitBias,
    NonEmpty,
    NumLogprobs,
    Penalty,
    Priority,
    Prompts,
    PromptsWithoutEmbeds,
    ResponseFormat,
    StopStrings,
    Strict,
    Text,
    TokenIds,
    Unsupported,
)
from orchestrator.llm.grammar import Grammar
from orchestrator.llm.params import GenerationParams

MAX_CHOICES = 1024
"""Choices of one request at most: prompts x n."""

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for the older endpoint


class StreamOptions(Strict):
    """``include_usage`` adds one last chunk with the usage; ``include_obfuscation`` is a hint without effect here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(Strict):
    """The fields that chats and completions share; each means what OpenAI's does, or vLLM's where OpenAI has none."""

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
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    data_parallel_rank: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    prompt_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: NonEmpty | None = None
    guided_grammar: NonEmpty | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    service_tier: Unsupported = None
    store: Unsupported = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @model_validator(mode="after")
    def _at_most_one_grammar(self) -> Self:
        if len(self._grammars()) > 1:
            raise ValueError("response_format, guided_json, guided_regex and guided_grammar exclude each other")
        return self

    @property
    def include_usage(self) -> bool:
        """Tell whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _grammars(self) -> list[Grammar]:
        asked = [
            None if self.response_format is None else self.response_format.to_grammar(),
            None if self.guided_json is None else Grammar.json_schema(self.guided_json, "guided_json"),
            None if self.guided_regex is None else Grammar.regex(self.guided_regex, "guided_regex"),
            None if self.guided_grammar is None else Grammar.lark(self.guided_grammar, "guided_grammar"),
        ]
        return [grammar for grammar in asked if grammar is not None]

    def _params(
        self,
        max_tokens: int | None,
        default_max_tokens: int | None,
        data_parallel_rank: int | None,
        logprobs: int | None,
        *,
        echo: bool,
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
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            echo=echo,
            grammar=next(iter(self._grammars()), None),
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
        )


class ChatMessage(Strict):
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
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    modalities: Unsupported = None
    parallel_tool_calls: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    tool_choice: Unsupported = None
    tools: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    def to_params(self, data_parallel_rank: int | None) -> GenerationParams:
        """Return the parameters; ``max_completion_tokens`` is the newer name of ``max_tokens`` and wins."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        max_tokens = self.max_completion_tokens or self.max_tokens
        return self._params(max_tokens, None, data_parallel_rank, logprobs, echo=False)


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt_embeds: EncodedEmbeds | None = None
    prompt: PromptsWithoutEmbeds = Field(default_factory=list, validate_default=True)

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None

    best_of: Unsupported = None
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _not_too_many_choices(self) -> Self:
        num_prompts = len(self.prompt) + len(self.prompt_embeds or ())
        if num_prompts * (self.n or 1) > MAX_CHOICES:
            raise ValueError(f"prompt holds {num_prompts} prompts: prompts times n may be {MAX_CHOICES} at most")
        return self

    @model_validator(mode="after")
    def _something_is_asked_for(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0: that leaves nothing to answer without echo or prompt_logprobs")
        return self

    def to_params(self, data_parallel_rank: int | None) -> GenerationParams:
        """Return the parameters."""
        return self._params(
            self.max_tokens, _COMPLETION_MAX_TOKENS, data_parallel_rank, self.logprobs, echo=bool(self.echo)
        )


MAX_INPUTS = 2048
"""OpenAI's own limit."""


class EmbeddingRequest(Strict):
    """Body of ``POST /v1/embeddings``; the meaning of each field is OpenAI's."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    data_parallel_rank: Annotated[int, Field(ge=0)] | None = None
    priority: Priority | None = None

    user: str | None = None

    @model_validator(mode="after")
    def _not_too_many_inputs(self) -> Self:
        if len(self.input) > MAX_INPUTS:
            raise ValueError(f"input holds {len(self.input)} prompts: {MAX_INPUTS} is the limit")
        return self
