"""What one client has not been sent yet."""

from collections import deque

from engine.proc.merged_outputs import MergedOutputs
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineCoreOutput, EngineCoreOutputs, UtilityOutput

MAX_OUTPUTS_PER_FRAME = 1024
"""A client that took nothing for long gets what waits in several frames: with vectors, one could be too large."""


class ClientOutputQueue:
    """Turns steps into numbered frames, and merges them per sequence while the client's pipe is full; pure.

    ``peek`` shows the next frame and ``sent`` confirms it, so that a frame the pipe refuses keeps its number and
    goes on growing. Memory is bounded by what the client has in flight, one entry per sequence, however long it takes
    nothing.
    """

    def __init__(self, engine_id: EngineId, client_id: ClientId) -> None:
        self._engine_id = engine_id
        self.client_id = client_id
        self._out_seq = 0
        self._report_seq = 0
        self._waiting = MergedOutputs()
        self._utility_outputs: deque[UtilityOutput] = deque()
        self._dead: str | None = None
        self._must_speak = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._utility_outputs)

    @property
    def has_frame(self) -> bool:
        """Tell whether there is anything to send."""
        return bool(self._waiting or self._utility_outputs or self._dead is not None or self._must_speak)

    def add(self, outputs: list[EngineCoreOutput], report_seq: int) -> None:
        """Take one step's outputs. report_seq: number of the first report that reflects the step."""
        self._report_seq = report_seq
        self._waiting.add(outputs)

    def add_utility(self, output: UtilityOutput, report_seq: int) -> None:
        """Take the answer of a utility call; each travels in a frame of its own."""
        self._report_seq = report_seq
        self._utility_outputs.append(output)

    def add_last_words(self, reason: str) -> None:
        """Say that the engine died; nothing may be added afterwards."""
        self._dead = reason

    def clear(self) -> None:
        """Forget what was not sent, and burn a number so that the client sees the gap."""
        self._waiting.clear()
        self._utility_outputs.clear()
        self._out_seq += 1
        self._must_speak = True

    def beat(self) -> None:
        """Let a frame follow though there is nothing to say: its number shows whether one before it was lost."""
        self._must_speak = True

    def peek(self, applied: int) -> EngineCoreOutputs:
        """Return the next frame. applied: last contiguous ``channel_seq`` of this client at this moment."""
        return EngineCoreOutputs(
            self._engine_id,
            self.client_id,
            self._out_seq + 1,
            applied,
            self._report_seq,
            self._waiting.first(MAX_OUTPUTS_PER_FRAME),
            self._utility_outputs[0] if self._utility_outputs else None,
            self._dead if self._only_last_words_left else None,
        )

    def sent(self) -> None:
        """Confirm that the frame ``peek`` returned is on its way."""
        self._out_seq += 1
        if self._only_last_words_left:
            self._dead = None
        self._waiting.remove_first(MAX_OUTPUTS_PER_FRAME)
        self._must_speak = False
        if self._utility_outputs:
            self._utility_outputs.popleft()

    @property
    def _only_last_words_left(self) -> bool:
        return not (self._waiting or self._utility_outputs or self._must_speak)
