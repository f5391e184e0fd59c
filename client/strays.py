"""Sequences that engines run for nobody."""

from collections.abc import Mapping

from client.engine_line import EngineLine
from client.sender import Sender
from engine.wire.ids import EngineId
from engine.wire.messages import AbortRequest, EngineCoreOutput, EngineCoreOutputs

MAX_REMEMBERED_STRAYS = 1024


class Strays:
    """Frees each of them once: the line repeats an abort by itself. The memory of whom is bounded."""

    def __init__(self, lines: Mapping[EngineId, EngineLine], sender: Sender) -> None:
        self._lines = lines
        self._sender = sender
        self._freed: dict[tuple[int, int, int], None] = {}

    def abort(self, outputs: EngineCoreOutputs, output: EngineCoreOutput) -> None:
        """Take a token that nobody waits for."""
        name = output.request_id, output.sample_index, output.attempt
        line = self._lines.get(outputs.engine_id)
        if name in self._freed or line is None:
            return
        self._freed[name] = None
        if len(self._freed) > MAX_REMEMBERED_STRAYS:
            del self._freed[next(iter(self._freed))]
        self._sender.send(line, AbortRequest(outputs.client_id, 0, *name))
