"""Which requests an engine can serve at all. The front-end checks first; this is the engine's own door."""

from engine.core.sampling_checks import sampling_fault
from engine.interfaces.engine_core import RunnerLimits
from engine.wire.messages import AddRequest
from engine.wire.sampling import EMBEDS_DTYPES


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
    """Each sample has randomness of its own, which counts in 32 bits."""
    if 0 <= sample_index < 1 << 32:
        return None
    return f"sample_index is {sample_index}; it must be between 0 and {(1 << 32) - 1}"


def _prompt_fault(request: AddRequest, limits: RunnerLimits, max_len: int) -> str | None:
    num_tokens = len(request.prompt_token_ids)
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
    """Numbers that are none are not looked for: they come out as such, and their sequence fails alone."""
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
