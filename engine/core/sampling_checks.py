"""Which sampling parameters an engine can follow. Each check returns one sentence that names the field, or None."""

import math
from collections.abc import Iterable

from engine.interfaces.engine_core import RunnerLimits
from engine.wire.sampling import MAX_LOGPROBS, SamplingParams

_MAX_SCORE = 1e6
_SCORE_LIMIT = " of at most a million either way"


def sampling_fault(sampling: SamplingParams, limits: RunnerLimits) -> str | None:
    """Return one sentence about the first parameter that is out of its range or beyond this engine, or None."""
    return (
        _length_fault(sampling)
        or _filter_fault(sampling)
        or _penalty_fault(sampling)
        or _vocabulary_fault(sampling, limits.vocab_size)
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
        if not _is_score(penalty):
            return f"{name}_penalty is {penalty}; it must be a number{_SCORE_LIMIT}"
    repetition = sampling.repetition_penalty
    if not (_is_score(repetition) and repetition > 0):
        return f"repetition_penalty is {repetition}; it must be a number above 0 and at most a million"
    if not all(map(_is_score, sampling.logit_bias.values())):
        return f"logit_bias holds a value that is no number{_SCORE_LIMIT}"
    return None


def _is_score(value: float) -> bool:
    """Tell whether scores that a value is added to many times, or multiplied by, stay within their number format."""
    return abs(value) <= _MAX_SCORE


def _vocabulary_fault(sampling: SamplingParams, vocab_size: int) -> str | None:
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
