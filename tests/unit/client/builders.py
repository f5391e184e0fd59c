"""Small messages for tests of the pure parts."""

from typing import Any

from msgspec.structs import replace

from client.engine_connection import EngineConnection
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import (
    AbortRequest,
    AddRequest,
    ChannelMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    FinishReason,
)
from engine.wire.sampling import SamplingParams

CLIENT = ClientId(0, 1)


def make_ready(rank: int = 0, incarnation: int = 1, build_id: str = "build", config_hash: str = "hash") -> EngineReady:
    """Return a handshake."""
    engine_id = EngineId(rank, incarnation)
    return EngineReady(engine_id, build_id, config_hash, 1000, 256, 10_000, 8, "cpu", "none", "here", 1)


def make_connection(rank: int = 0, incarnation: int = 1) -> EngineConnection:
    """Return a fresh line, opened at time 0."""
    return EngineConnection(make_ready(rank, incarnation), 0.0)


def make_add(request_id: int, sample_index: int = 0, num_prompt_tokens: int = 1, **sampling: Any) -> AddRequest:
    """Return a request of one sample."""
    params = SamplingParams(**({"max_tokens": 4} | sampling))
    return AddRequest(CLIENT, 0, request_id, sample_index, 0, [1] * num_prompt_tokens, [], params)


def make_tokens(request: AddRequest, first_position: int, *token_ids: int) -> EngineCoreOutput:
    """Return new tokens of a request, said by the engine that has its current attempt."""
    name = request.request_id, request.sample_index
    return EngineCoreOutput(*name, request.attempt, first_position, list(token_ids))


def make_end(
    request: AddRequest, reason: FinishReason = FinishReason.LENGTH, first_position: int = 0
) -> EngineCoreOutput:
    """Return the end of a request, without a new token."""
    name = request.request_id, request.sample_index
    return EngineCoreOutput(*name, request.attempt, first_position, [], reason)


def make_batch(
    connection: EngineConnection, *outputs: EngineCoreOutput, report_seq: int = 1, applied: int = 0
) -> EngineCoreOutputs:
    """Return a batch of one engine."""
    return EngineCoreOutputs(connection.engine_id, CLIENT, 1, applied, report_seq, list(outputs))


class RecordingSender:
    """Accepts what it is told to accept and keeps what it accepted."""

    def __init__(self) -> None:
        self.sent: list[tuple[EngineId, ChannelMessage]] = []
        self.refusing: set[EngineId] = set()

    def send(self, connection: EngineConnection, message: ChannelMessage) -> None:
        """Stage the message as the real sender does."""
        self._send(connection, message)

    def send_add(self, connection: EngineConnection, request: AddRequest) -> bool:
        """Take a refused request back as the real sender does."""
        accepted = self._send(connection, request)
        if not accepted:
            connection.unstage()
        return accepted

    def _send(self, connection: EngineConnection, message: ChannelMessage) -> bool:
        connection.stage(message)
        if connection.engine_id in self.refusing:
            connection.blocked = True
            return False
        self.sent.append((connection.engine_id, replace(message)))
        return True

    @property
    def added(self) -> list[tuple[EngineId, AddRequest]]:
        """Return every ADD with the engine it went to."""
        return [(engine_id, m) for engine_id, m in self.sent if isinstance(m, AddRequest)]

    @property
    def aborted(self) -> list[tuple[int, int, int]]:
        """Return (request_id, sample_index, attempt) of every abort."""
        return [(m.request_id, m.sample_index, m.attempt) for _, m in self.sent if isinstance(m, AbortRequest)]
