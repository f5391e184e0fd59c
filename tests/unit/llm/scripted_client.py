"""A verified fake of the engines' client, and the facade in front of it.

``test_scripted_client.py`` runs it and the real ``InprocClient`` through one contract.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from client.core_client import GroupClient
from client.mailbox import OutputHandler
from engine.wire.errors import EngineDeadError, InvalidRequestError, OverloadedError
from engine.wire.ids import ClientId, EngineId, RequestIds
from engine.wire.messages import AddRequest, EngineCoreOutput, EngineCoreOutputs, EngineReady, FinishReason
from engine.wire.states import EngineState
from lb.views.engine_view import EngineView
from metrics.stats import ServingStats
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.stream import RequestStream
from orchestrator.llm.tokenizer import TextTokenizer, byte_tokenizer

CLIENT = ClientId(0, 1)
ENGINE = EngineId(4, 1)
READY = EngineReady(ENGINE, "b", "h", 50, 256, 1000, 64, "cpu", "float32", "here", 1)


class ScriptedClient(GroupClient):
    """Takes what it is sent and answers what the test puts in."""

    def __init__(self) -> None:
        self.client_id = CLIENT
        self.request_ids = RequestIds(CLIENT)
        self.sent: list[AddRequest] = []
        self.aborted: list[tuple[int, int | None]] = []
        self.refuse_after = 1_000
        self.ready: EngineReady | None = READY
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()

    def engine_views(self) -> list[EngineView]:
        if self.ready is None:
            return []
        return [EngineView(engine_id=ENGINE, state=EngineState.READY, ready=self.ready)]

    def statistics(self) -> dict[str, int]:
        return {}

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        if data_parallel_rank not in (None, ENGINE.rank):
            raise InvalidRequestError(f"no rank {data_parallel_rank}; valid: {ENGINE.rank}", "data_parallel_rank")
        if len(self.sent) >= self.refuse_after:
            raise OverloadedError("full")
        self.sent.append(request)
        return ENGINE

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        self.aborted += [(request_id, sample_index) for request_id in request_ids]

    async def get_output_async(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, Exception):
            self._outputs.put_nowait(item)  # every later call raises it again
            raise item
        return item

    async def consume_outputs(self, handler: OutputHandler) -> None:
        while True:
            handler(await self.get_output_async())

    def say(self, request: AddRequest, text: str, finish: FinishReason | None = None) -> None:
        """Let the engine send text of a sequence, and its end."""
        self.put(EngineCoreOutput(request.request_id, request.sample_index, 0, 0, list(text.encode()), finish))

    def put(self, *outputs: EngineCoreOutput) -> None:
        """Let the engine send these in one message."""
        self._outputs.put_nowait(EngineCoreOutputs(ENGINE, CLIENT, 1, 0, 0, list(outputs)))

    def end(self, error: Exception | None = None) -> None:
        """Let nothing more come."""
        self._outputs.put_nowait(error or EngineDeadError("the client was closed"))


@asynccontextmanager
async def facade(client: GroupClient, tokenizer: TextTokenizer | None = None) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(client, tokenizer or byte_tokenizer(), ServingStats(), random.Random(1))
    llm.start()
    try:
        yield llm
    finally:
        await llm.aclose()


async def ends_of(stream: RequestStream) -> list[tuple[str, str | None]]:
    """Wait for the end of a stream; return text and finish reason of each choice.

    Raises:
        ShoalError: the stream ended with that error.
    """
    await stream.wait_finished()
    if stream.error is not None:
        raise stream.error
    return [(choice.take_text(), choice.finish_reason) for choice in stream.choices]
