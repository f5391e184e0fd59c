"""The output queue of one client: what it has not been sent yet, as numbered frames, merged per sequence; pure."""

from collections import deque
from collections.abc import Sequence
from copy import copy
from itertools import chain, islice

from engine.wire.ids import ClientId, EngineId
from engine.wire.logprobs import Logprobs
from engine.wire.messages import EngineCoreOutput, EngineCoreOutputs, UtilityOutput

MAX_OUTPUTS_PER_FRAME = 1024
"""A client that took nothing for long gets what waits in several frames: with vectors, one could be too large."""

_Key = tuple[int, int, int]
"""(request_id, sample_index, attempt): outputs of two attempts are never merged."""


class ClientOutputQueue:
    """The one queue between the busy loop, which adds, and the output thread, which takes.

    One step's outputs, the usual case, are handed through as they are. When a second step comes before they were taken,
    outputs are joined per sequence into copies, which grow in place: a client that takes nothing costs each step its
    new tokens, not all that wait. So memory is bounded by what the client has in flight, one entry per sequence,
    however long it takes nothing.

    A frame that the pipe refuses is ``put_back``: it keeps its number and goes on growing.

    Invariant: ``_step`` or ``_joined`` is empty.
    """

    def __init__(self, engine_id: EngineId, client_id: ClientId) -> None:
        self._engine_id = engine_id
        self.client_id = client_id
        self._out_seq = 0
        self._report_seq = 0
        self._step: list[EngineCoreOutput] = []
        self._joined: dict[_Key, EngineCoreOutput] = {}
        self._utility_outputs: deque[UtilityOutput] = deque()
        self._last_words: str | None = None
        self._owes_frame = False

    def __len__(self) -> int:
        return len(self._step) + len(self._joined) + len(self._utility_outputs)

    @property
    def has_frame(self) -> bool:
        """Tell whether there is anything to send."""
        return bool(len(self) or self._last_words is not None or self._owes_frame)

    # --- adding -----------------------------------------------------------------------------------------------------

    def add(self, outputs: list[EngineCoreOutput], report_seq: int) -> None:
        """Take one step's outputs, which stay as they are. report_seq: of the first report that reflects the step."""
        self._report_seq = report_seq
        if self._step or self._joined:
            self._join(outputs)
        else:
            self._step = outputs

    def add_utility(self, output: UtilityOutput, report_seq: int) -> None:
        """Take the answer of a utility call; each travels in a frame of its own."""
        self._report_seq = report_seq
        self._utility_outputs.append(output)

    def add_last_words(self, reason: str) -> None:
        """Take the reason of the engine's death; it goes out behind everything else, and nothing may follow it."""
        self._last_words = reason

    def clear(self) -> None:
        """Forget what was not sent, and skip a number so that the client sees the gap."""
        self._step, self._joined = [], {}  # last words stay: they explain what the gap does not
        self._utility_outputs.clear()
        self._out_seq += 1
        self._owes_frame = True  # only a frame behind the gap shows it

    # --- taking -----------------------------------------------------------------------------------------------------

    def take(self, applied: int, *, even_if_empty: bool = False) -> EngineCoreOutputs | None:
        """Return the next frame, with its number drawn; None when there is nothing to send.

        applied: last contiguous ``channel_seq`` of this client, read when no output can be added: what a frame answers
        it also acknowledges. even_if_empty: a heartbeat is due.
        """
        if not (even_if_empty or self.has_frame):
            return None
        outputs = self._take_outputs()
        utility_output = self._utility_outputs.popleft() if self._utility_outputs else None
        last_words = None
        if not outputs and utility_output is None:  # behind everything else: the client closes when it reads them
            last_words, self._last_words = self._last_words, None
        self._owes_frame = False
        self._out_seq += 1
        return EngineCoreOutputs(
            self._engine_id,
            self.client_id,
            self._out_seq,
            applied,
            self._report_seq,
            outputs,
            utility_output,
            last_words,
        )

    def put_back(self, frame: EngineCoreOutputs) -> None:
        """Take back the frame that was taken last, because it was refused: in front of what came meanwhile."""
        self._out_seq -= 1  # nothing was taken since, so the number is free again
        later = self._step or list(self._joined.values())
        self._step, self._joined = frame.outputs, {}
        if later:
            self._join(later)
        if frame.utility_output is not None:
            self._utility_outputs.appendleft(frame.utility_output)
        if frame.dead is not None:
            self._last_words = frame.dead
        self._owes_frame = True

    def _take_outputs(self) -> list[EngineCoreOutput]:
        if self._joined:
            return [self._joined.pop(key) for key in list(islice(self._joined, MAX_OUTPUTS_PER_FRAME))]
        if len(self._step) <= MAX_OUTPUTS_PER_FRAME:
            outputs, self._step = self._step, []
            return outputs
        outputs = self._step[:MAX_OUTPUTS_PER_FRAME]
        self._step = self._step[MAX_OUTPUTS_PER_FRAME:]
        return outputs

    # --- merging ----------------------------------------------------------------------------------------------------

    def _join(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in chain(self._step, outputs):
            key = (output.request_id, output.sample_index, output.attempt)
            waiting = self._joined.get(key)
            if waiting is None:
                self._joined[key] = _copy(output)
            else:
                _absorb(waiting, output)
        self._step = []


def _copy(output: EngineCoreOutput) -> EngineCoreOutput:
    copied = copy(output)  # shallow: the list of tokens, which grows, would be shared with the step
    copied.new_token_ids = output.new_token_ids.copy()
    return copied


def _absorb(waiting: EngineCoreOutput, later: EngineCoreOutput) -> None:
    """Add a later output of the same attempt: tokens joined, first facts kept, the end from the later one."""
    waiting.new_token_ids += later.new_token_ids
    waiting.finish_reason = later.finish_reason
    waiting.stop_token_id = later.stop_token_id
    waiting.error = later.error
    waiting.error_kind = later.error_kind
    if waiting.queue_time_s is None:
        waiting.queue_time_s = later.queue_time_s
    waiting.num_cached_tokens = waiting.num_cached_tokens or later.num_cached_tokens
    waiting.logprobs = _join_logprobs(waiting.logprobs, later.logprobs)
    waiting.prompt_logprobs = waiting.prompt_logprobs or later.prompt_logprobs
    waiting.pooled = later.pooled  # it comes with the end


def _join_logprobs(before: Logprobs | None, after: Logprobs | None) -> Logprobs | None:
    return before + after if before is not None and after is not None else before or after
