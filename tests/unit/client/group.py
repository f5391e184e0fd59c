"""A dispatcher with its lines and a sender that accepts or refuses as the test says."""

from collections import Counter

from client.dispatcher import Dispatcher
from client.engine_connection import EngineConnection
from client.migration import MigrationConfig
from client.sequences import MigrationReason
from engine.wire.ids import EngineId
from engine.wire.messages import EngineCoreOutput
from lb.routing.picker import RotatingPicker
from tests.unit.client.builders import RecordingSender, make_batch, make_connection


class Group:
    """What a client does around a dispatcher: lines come and go, and after each event it sends on and takes ends.

    config: default: suspects go on at once.
    """

    def __init__(self, num_ranks: int, config: MigrationConfig | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.sender = RecordingSender()
        self.connections: dict[EngineId, EngineConnection] = {}
        self.dispatcher = Dispatcher(
            self.connections, RotatingPicker(0), self.sender, self.counts, config or MigrationConfig(suspect_rest_s=0.0)
        )
        for rank in range(num_ranks):
            self.open(rank)

    def open(self, rank: int, incarnation: int = 1) -> EngineConnection:
        """Let an engine shake hands."""
        connection = make_connection(rank, incarnation)
        self.connections[connection.engine_id] = connection
        self.dispatcher.refresh()
        return connection

    def close(
        self, connection: EngineConnection, why: MigrationReason = MigrationReason.DEATH
    ) -> list[EngineCoreOutput]:
        """Take an engine out; return the ends that this made."""
        del self.connections[connection.engine_id]
        self.dispatcher.on_connection_closed(connection, "gone", why)
        return self.settle()

    def hear(
        self,
        connection: EngineConnection,
        *outputs: EngineCoreOutput,
        report_seq: int = 1,
        is_gap: bool = False,
        applied: int = 0,
    ) -> list[EngineCoreOutput]:
        """Let an engine speak, after frames that were lost if ``is_gap``; return what reaches the consumer."""
        batch = make_batch(connection, *outputs, report_seq=report_seq, applied=applied)
        if is_gap:
            self.dispatcher.on_outputs_lost(connection, batch, "outputs were lost")
        self.dispatcher.on_outputs(batch)
        return batch.outputs + self.settle()

    def settle(self) -> list[EngineCoreOutput]:
        """Send on what waits; return the ends made by the dispatcher."""
        self.dispatcher.send_waiting()
        return self.dispatcher.take_ends()
