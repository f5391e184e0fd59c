"""What the engine has to tell its clients since the last step."""

from engine.interfaces.plan import Sample, SequenceState
from engine.wire.ids import ClientId
from engine.wire.logprobs import Logprobs
from engine.wire.messages import EngineCoreOutput, ErrorKind, FinishReason
from engine.wire.tensors import Tensor


class OutputBuilder:
    """Outputs collected per client, in the order they happened, until ``take``."""

    def __init__(self) -> None:
        self._outputs: dict[ClientId, list[EngineCoreOutput]] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def take(self) -> dict[ClientId, list[EngineCoreOutput]]:
        """Return everything collected and begin anew."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def forget(self, client_id: ClientId) -> None:
        """Drop what was meant for a client that has gone."""
        self._outputs.pop(client_id, None)

    def token(self, sequence: SequenceState, sample: Sample, finish_reason: FinishReason | None) -> None:
        """Tell a new token, and the end when it was the last one; call it when the token has joined the sequence."""
        output = _output(sequence, sequence.num_output_tokens - 1, [sample.token_id], finish_reason)
        output.logprobs = sample.logprobs
        output.prompt_logprobs = sample.prompt_logprobs
        self._add(sequence, output)

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
        """Tell the end of a sequence without a new token."""
        output = _output(sequence, sequence.num_output_tokens, [], finish_reason)
        output.stop_token_id = stop_token_id
        output.error = error
        output.error_kind = error_kind
        output.prompt_logprobs = prompt_logprobs
        output.pooled = pooled
        self._add(sequence, output)

    def _add(self, sequence: SequenceState, output: EngineCoreOutput) -> None:
        outputs = self._outputs.get(sequence.client_id)
        if outputs is None:
            self._outputs[sequence.client_id] = [output]
        else:
            outputs.append(output)


def _output(
    sequence: SequenceState, first_position: int, new_token_ids: list[int], finish_reason: FinishReason | None
) -> EngineCoreOutput:
    output = EngineCoreOutput(
        sequence.request_id, sequence.sample_index, sequence.attempt, first_position, new_token_ids, finish_reason
    )
    if first_position == sequence.num_resumed and sequence.scheduled_at is not None:
        output.queue_time_s = sequence.scheduled_at - sequence.received_at
        output.num_cached_tokens = min(sequence.num_cached, sequence.num_prompt_tokens)
    return output
