"""The outputs of an engine: the rules that end a sequence, and the messages that its client is to get.

Counts are over all attempts, so a sequence that was migrated ends where it would have ended on its first engine.
"""

from engine.interfaces.plan import Sample, SequenceState
from engine.wire.ids import ClientId
from engine.wire.logprobs import Logprobs
from engine.wire.messages import EngineCoreOutput, ErrorKind, FinishReason
from engine.wire.tensors import Tensor

# --- when a sequence ends --------------------------------------------------------------------------------------------


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
    """Tell whether the sequence runs for its prompt's log-probabilities alone: it ends without a token."""
    return sequence.sampling.max_tokens == 0 and sequence.awaits_prompt_logprobs


def draws_nothing(sequence: SequenceState) -> bool:
    """Tell whether the sequence runs its prompt and ends without a token."""
    return sequence.pooling is not None or returns_only_logprobs(sequence)


def is_full(sequence: SequenceState, max_len: int) -> bool:
    """Tell whether the sequence may not grow: ``max_tokens`` are out, or ``max_len`` tokens with the prompt."""
    return sequence.num_output_tokens >= sequence.sampling.max_tokens or len(sequence.token_ids) >= max_len


# --- what its client gets --------------------------------------------------------------------------------------------


class OutputBuilder:
    """Builds the outputs of each client, in the order they happened, until ``take``.

    Several outputs of one sequence may meet here, for instance an ABORT and the first token of the next attempt; they
    stay separate messages, because the attempt is part of a sequence's name.
    """

    def __init__(self) -> None:
        self._outputs: dict[ClientId, list[EngineCoreOutput]] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def take(self) -> dict[ClientId, list[EngineCoreOutput]]:
        """Return everything collected and begin anew; the caller owns the dict and its lists."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def forget(self, client_id: ClientId) -> None:
        """Drop what was meant for a client that has gone."""
        self._outputs.pop(client_id, None)

    def token(self, sequence: SequenceState, sample: Sample, finish_reason: FinishReason | None) -> None:
        """Add a new token, and the end when it was the last one; call it when the token has joined the sequence."""
        output = self._add(sequence, sequence.num_output_tokens - 1, [sample.token_id], finish_reason)
        output.logprobs = sample.logprobs
        output.prompt_logprobs = sample.prompt_logprobs

    def end(
        self,
        sequence: SequenceState,
        finish_reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_kind: ErrorKind = ErrorKind.ENGINE,
        prompt_logprobs: Logprobs | None = None,
        pooled: Tensor | None = None,
    ) -> None:
        """Add the end of a sequence without a new token."""
        output = self._add(sequence, sequence.num_output_tokens, [], finish_reason)
        output.stop_token_id = stop_token_id
        output.error = error
        output.error_kind = error_kind
        output.prompt_logprobs = prompt_logprobs
        output.pooled = pooled

    def _add(
        self, sequence: SequenceState, first_position: int, new_token_ids: list[int], finish_reason: FinishReason | None
    ) -> EngineCoreOutput:
        output = EngineCoreOutput(
            sequence.request_id, sequence.sample_index, sequence.attempt, first_position, new_token_ids, finish_reason
        )
        # With the first output of an attempt, and only if it ever ran: a sequence refused at once has no queue time.
        if first_position == sequence.num_resumed and sequence.scheduled_at is not None:
            output.queue_time_s = sequence.scheduled_at - sequence.received_at
            # The cache may hold output tokens of earlier attempts too; what is reported counts the prompt alone.
            output.num_cached_tokens = min(sequence.num_cached, sequence.num_prompt_tokens)
        outputs = self._outputs.get(sequence.client_id)
        if outputs is None:
            self._outputs[sequence.client_id] = [output]
        else:
            outputs.append(output)
        return output
