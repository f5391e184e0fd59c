"""The outputs of offline use: one per prompt, with its samples or its vector."""

import time
from dataclasses import dataclass

from engine.wire.errors import OverloadedError, ShoalError
from orchestrator.llm.embeds import shorten
from orchestrator.llm.logprobs import TokenLogprob
from orchestrator.llm.stream import Choice, RequestStream


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample of a prompt.

    token_ids: all tokens drawn; those of a stop string are among them, a stop token is not.
    finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
    logprobs: one entry per token of ``token_ids``, each with as many best ones as ``GenerationParams.logprobs`` says;
        with ``echo`` those of the prompt's tokens come before them. None when they were not asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """How long one prompt took, in seconds from the moment it was handed to the engines.

    queue_time_s: how long its first sample waited, by its engine. ttft_s: until the first token of any sample. None for
        both: there was no token. e2e_s: until its end.
    """

    queue_time_s: float | None
    ttft_s: float | None
    e2e_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One prompt and what became of it.

    prompt: its text; None when it was given as token ids or embeddings, or no text could be made of the messages.
    prompt_token_ids: empty for embeddings.
    outputs: one per sample, by index; what was drawn before an error is kept, a prompt that was refused has none.
    prompt_logprobs: one entry per token of ``prompt_token_ids``, each with as many best ones as
        ``GenerationParams.prompt_logprobs`` says; the first has no log-probability, because nothing comes before it.
        None when they were not asked for, or the prompt failed before it was computed.
    num_cached_tokens: prompt tokens served from the prefix cache.
    metrics: None for a prompt that was refused.
    error: why this prompt alone failed, or None.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: ShoalError | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """One prompt and its vector.

    prompt: its text; None when it was given as token ids. embedding: of length 1; empty when there is an error.
    num_cached_tokens: prompt tokens served from the prefix cache. error: why this prompt alone failed, or None.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int = 0
    error: ShoalError | None = None


def embedded_output(
    prompt: str | None, prompt_token_ids: list[int], stream: RequestStream, dimensions: int | None
) -> EmbeddingOutput:
    """Return what a stream that has ended brought for one prompt. dimensions: numbers that are wanted, None for all."""
    pooled, error = stream.choices[0].pooled, stream.error
    if pooled is None and error is None:
        error = OverloadedError("the prompt was aborted before its vector was there")
    return EmbeddingOutput(
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        embedding=[] if pooled is None else shorten(pooled, dimensions).tolist(),
        num_cached_tokens=stream.num_cached_tokens,
        error=error,
    )


def finished_output(prompt: str | None, prompt_token_ids: list[int], stream: RequestStream) -> RequestOutput:
    """Return what a stream that has ended, and of which nothing was taken, brought for one prompt."""
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[_completion(choice) for choice in stream.choices],
        num_cached_tokens=stream.num_cached_tokens,
        metrics=_metrics(stream),
        error=stream.error,
        prompt_logprobs=_prompt_logprobs(stream),
    )


def _prompt_logprobs(stream: RequestStream) -> list[TokenLogprob] | None:
    """Return those of the first sample that has them: they are the same for all."""
    collected = [choice.logprobs for choice in stream.choices if choice.logprobs is not None]
    return next((logprobs.prompt for logprobs in collected if logprobs.prompt is not None), None)


def _completion(choice: Choice) -> CompletionOutput:
    logprobs = choice.logprobs
    return CompletionOutput(
        index=choice.index,
        text=choice.take_text(),
        token_ids=choice.token_ids or [],
        finish_reason=choice.finish_reason or "error",
        logprobs=logprobs.take() if logprobs is not None and logprobs.has_outputs else None,
    )


def _metrics(stream: RequestStream) -> RequestMetrics:
    first = min((choice.first_token_at for choice in stream.choices if choice.first_token_at), default=None)
    return RequestMetrics(
        queue_time_s=stream.choices[0].queue_time_s,
        ttft_s=None if first is None else first - stream.created_at,
        e2e_s=time.monotonic() - stream.created_at,
    )
