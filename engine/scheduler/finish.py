"""When a sequence is done. Counts are over all attempts, so a moved sequence ends where it would have ended at home."""

from engine.interfaces.plan import SequenceState


def stops_at(sequence: SequenceState, token_id: int, eos_token_ids: frozenset[int]) -> bool:
    """Tell whether a sampled token ends the sequence instead of joining its text.

    Before ``min_tokens`` output tokens a stop token is a token like any other. ``ignore_eos`` goes past the model's own
    end tokens, not past those the caller asked for.
    """
    sampling = sequence.sampling
    if sequence.num_output_tokens < sampling.min_tokens:
        return False
    return token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos)


def returns_only_logprobs(sequence: SequenceState) -> bool:
    """Tell whether the sequence is there for its prompt's log-probabilities alone: it ends without a token."""
    return sequence.sampling.max_tokens == 0 and sequence.awaits_prompt_logprobs


def draws_nothing(sequence: SequenceState) -> bool:
    """Tell whether the sequence runs its prompt and ends without a token."""
    return sequence.pooling is not None or returns_only_logprobs(sequence)


def is_full(sequence: SequenceState, max_len: int) -> bool:
    """Tell whether the sequence may not grow: ``max_tokens`` are out, or ``max_len`` tokens with the prompt."""
    return sequence.num_output_tokens >= sequence.sampling.max_tokens or len(sequence.token_ids) >= max_len
