"""Sequences that engines run for nobody."""

from collections.abc import Mapping

from client.engine_connection import EngineConnection
from client.sender import Sender
from engine.wire.ids import EngineId
from engine.wire.messages import AbortRequest, EngineCoreOutput, EngineCoreOutputs

MAX_REMEMBERED_ORPHANS = 1024


class OrphanedRequests:
    """Frees each of them once: the line repeats an abort by itself. The memory of whom is bounded."""

    def __init__(self, connections: Mapping[EngineId, EngineConnection], sender: Sender) -> None:
        self._connections = connections
        self._sender = sender
        self._freed: dict[tuple[int, int, int], None] = {}

    def abort(self, outputs: EngineCoreOutputs, output: EngineCoreOutput) -> None:
        """Take a token that nobody waits for."""
        name = output.request_id, output.sample_index, output.attempt
        connection = self._connections.get(outputs.engine_id)
        if name in self._freed or connection is None:
            return
        self._freed[name] = None
        if len(self._freed) > MAX_REMEMBERED_ORPHANS:
            del self._freed[next(iter(self._freed))]
        self._sender.send(connection, AbortRequest(outputs.client_id, 0, *name))
