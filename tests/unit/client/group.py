"""A dispatcher with its lines and a sender that accepts or refuses as the test says."""

from collections import Counter

from client.config import MoveConfig
from client.dispatcher import Dispatcher
from client.engine_line import EngineLine
from client.sequences import MoveReason
from engine.wire.ids import EngineId
from engine.wire.messages import EngineCoreOutput
from lb.picker import RotatingPicker
from tests.unit.client.builders import RecordingSender, make_batch, make_line


class Group:
    """What a client does around a dispatcher: lines come and go, and after each event it sends on and takes ends.

    config: default: suspects go on at once.
    """

    def __init__(self, num_ranks: int, config: MoveConfig | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.sender = RecordingSender()
        self.lines: dict[EngineId, EngineLine] = {}
        self.dispatcher = Dispatcher(
            self.lines, RotatingPicker(0), self.sender, self.counts, config or MoveConfig(suspect_rest_s=0.0)
        )
        for rank in range(num_ranks):
            self.open(rank)

    def open(self, rank: int, incarnation: int = 1) -> EngineLine:
        """Let an engine shake hands."""
        line = make_line(rank, incarnation)
        self.lines[line.engine_id] = line
        self.dispatcher.refresh()
        return line

    def close(self, line: EngineLine, why: MoveReason = MoveReason.DEATH) -> list[EngineCoreOutput]:
        """Take an engine out; return the ends that this made."""
        del self.lines[line.engine_id]
        self.dispatcher.on_line_closed(line, "gone", why)
        return self.settle()

    def hear(
        self, line: EngineLine, *outputs: EngineCoreOutput, report_seq: int = 1, is_gap: bool = False, applied: int = 0
    ) -> list[EngineCoreOutput]:
        """Let an engine speak, after frames that were lost if ``is_gap``; return what reaches the consumer."""
        batch = make_batch(line, *outputs, report_seq=report_seq, applied=applied)
        if is_gap:
            self.dispatcher.on_outputs_lost(line, batch, "outputs were lost")
        self.dispatcher.on_outputs(batch)
        return batch.outputs + self.settle()

    def settle(self) -> list[EngineCoreOutput]:
        """Send on what waits; return the ends made by the dispatcher."""
        self.dispatcher.send_waiting()
        return self.dispatcher.take_ends()
