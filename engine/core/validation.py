"""Validation of requests: one sentence that names the field or limit a request breaks, or None.

The front end checks first and answers 400; this is the engine's own check, because any bytes may come over a channel.
"""

import math
from collections.abc import Iterable

from engine.interfaces.engine_core import RunnerLimits
from engine.wire.messages import AddRequest
from engine.wire.sampling import EMBEDS_DTYPES, MAX_LOGPROBS, SamplingParams

_MAX_LOGIT_CHANGE = 1e6
_SCORE_LIMIT = " of at most a million either way"


def find_fault(request: AddRequest, limits: RunnerLimits, max_len: int) -> str | None:
    """Return one sentence that names the limit a request breaks, or None when it can be served.

    max_len: prompt + output tokens of one sequence at most; the smaller of the model's limit and the KV pool's.
    """
    return (
        _sample_fault(request.sample_index)
        or _prompt_fault(request, limits, max_len)
        or _vocabulary_fault(request.prompt_token_ids, "prompt", limits.vocab_size)
        or _vocabulary_fault(request.output_token_ids, "output", limits.vocab_size)
        or sampling_fault(request.sampling, limits)
        or _embeds_fault(request, limits)
        or _pooling_fault(request, limits)
    )


def _sample_fault(sample_index: int) -> str | None:
    # Each sample has randomness of its own, whose counter takes the index in 32 bits.
    if 0 <= sample_index < 1 << 32:
        return None
    return f"sample_index is {sample_index}; it must be between 0 and {(1 << 32) - 1}"


def _prompt_fault(request: AddRequest, limits: RunnerLimits, max_len: int) -> str | None:
    num_tokens = len(request.prompt_token_ids)
    # Room for one output token is needed, not for all of them: a sequence that reaches the limit ends with LENGTH.
    num_needed = 0 if request.pooling is not None else min(request.sampling.max_tokens, 1)
    if num_tokens == 0:
        return "the prompt is empty"
    if num_tokens + num_needed <= max_len:
        return None
    if max_len == limits.max_model_len:
        limit = f"the model's limit of {max_len} tokens (max_model_len)"
    else:
        limit = f"the {max_len} tokens the KV cache holds"
    return f"the prompt has {num_tokens} tokens; with {num_needed} output tokens it exceeds {limit}"


def _vocabulary_fault(token_ids: list[int], what: str, vocab_size: int) -> str | None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        return f"a {what} token id is outside the vocabulary, 0 to {vocab_size - 1}"
    return None


def _embeds_fault(request: AddRequest, limits: RunnerLimits) -> str | None:
    # NaN and infinity are not looked for: they come out as such, and their sequence fails alone.
    embeds = request.prompt_embeds
    if embeds is None:
        return None
    if "prompt_embeds" not in limits.features:
        return "prompt_embeds cannot be taken: this engine's model takes tokens only"
    if embeds.dtype not in EMBEDS_DTYPES:
        return f"prompt_embeds are {embeds.dtype}; they must be {', '.join(EMBEDS_DTYPES)}"
    wanted = len(request.prompt_token_ids), limits.hidden_size
    if embeds.shape != wanted:
        return f"prompt_embeds have the shape {list(embeds.shape)}; for this prompt it must be {list(wanted)}"
    if request.sampling.num_prompt_logprobs is not None:
        return "prompt_logprobs cannot be told of prompt_embeds: such a prompt has no tokens"
    return None


def _pooling_fault(request: AddRequest, limits: RunnerLimits) -> str | None:
    if request.pooling is None:
        return None
    if "pooling" not in limits.features:
        return "a vector cannot be given: this engine's model does not show its hidden states"
    if request.output_token_ids or request.sampling.num_prompt_logprobs is not None:
        return "a sequence that is pooled has no output tokens and tells no log-probabilities"
    return None


# --- sampling parameters ----------------------------------------------------------------------------------------


def sampling_fault(sampling: SamplingParams, limits: RunnerLimits) -> str | None:
    """Return one sentence about the first parameter that is out of its range or beyond this engine, or None."""
    return (
        _length_fault(sampling)
        or _filter_fault(sampling)
        or _penalty_fault(sampling)
        or _token_list_fault(sampling, limits.vocab_size)
        or _feature_fault(sampling, limits.features)
    )


def _length_fault(sampling: SamplingParams) -> str | None:
    if sampling.max_tokens < 0:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 0"
    return None


def _filter_fault(sampling: SamplingParams) -> str | None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}; it must be a number of at least 0"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}; it must be between 0 and 1"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}; it must be at least 0"
    return None


def _penalty_fault(sampling: SamplingParams) -> str | None:
    for name, penalty in (("presence", sampling.presence_penalty), ("frequency", sampling.frequency_penalty)):
        if not _may_change_logits(penalty):
            return f"{name}_penalty is {penalty}; it must be a number{_SCORE_LIMIT}"
    repetition = sampling.repetition_penalty
    if not (_may_change_logits(repetition) and repetition > 0):
        return f"repetition_penalty is {repetition}; it must be a number above 0 and at most a million"
    if not all(map(_may_change_logits, sampling.logit_bias.values())):
        return f"logit_bias holds a value that is no number{_SCORE_LIMIT}"
    return None


def _may_change_logits(value: float) -> bool:
    """Tell whether logits stay within their number format when the value is added many times, or multiplies them."""
    return abs(value) <= _MAX_LOGIT_CHANGE


def _token_list_fault(sampling: SamplingParams, vocab_size: int) -> str | None:
    tokens: tuple[tuple[str, Iterable[int]], ...] = (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", (token for word in sampling.bad_words for token in word)),
    )
    for name, token_ids in tokens:
        if not all(0 <= token < vocab_size for token in token_ids):
            return f"{name} holds a token id outside the vocabulary, 0 to {vocab_size - 1}"
    return None if all(sampling.bad_words) else "bad_words holds one without a token"


def _feature_fault(sampling: SamplingParams, features: frozenset[str]) -> str | None:
    for name, num_top in (("logprobs", sampling.num_logprobs), ("prompt_logprobs", sampling.num_prompt_logprobs)):
        if num_top is not None and not 0 <= num_top <= MAX_LOGPROBS:
            return f"{name} is {num_top}; it must be between 0 and {MAX_LOGPROBS}"
        if num_top is not None and "logprobs" not in features:
            return f"{name} cannot be told: this engine has no scores"
    if sampling.grammar is not None and "grammar" not in features:
        return "response_format cannot be followed: this engine cannot match its tokens with a grammar"
    return None
