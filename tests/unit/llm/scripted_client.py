"""A client that answers what the test puts in, and the facade in front of it."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from engine.wire.errors import OverloadedError
from engine.wire.ids import ClientId, EngineId, RequestIds
from engine.wire.messages import AddRequest, EngineCoreOutput, EngineCoreOutputs, EngineReady, FinishReason
from engine.wire.states import EngineState
from lb.views.engine_view import EngineView
from metrics.stats import ServingStats
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.tokenizer import TextTokenizer, byte_tokenizer

CLIENT = ClientId(0, 1)
ENGINE = EngineId(4, 1)
READY = EngineReady(ENGINE, "b", "h", 50, 256, 1000, 64, "cpu", "float32", "here", 1)


class ScriptedClient:
    """Takes what it is sent and answers what the test puts in. The real client has its own suite."""

    def __init__(self) -> None:
        self.client_id = CLIENT
        self.request_ids = RequestIds(CLIENT)
        self.sent: list[AddRequest] = []
        self.aborted: list[tuple[int, int | None]] = []
        self.outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self.refuse_after = 1_000
        self.ready: EngineReady | None = READY

    def engine_views(self) -> list[EngineView]:
        if self.ready is None:
            return []
        return [EngineView(engine_id=ENGINE, state=EngineState.READY, ready=self.ready)]

    def statistics(self) -> dict[str, int]:
        return {}

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        if len(self.sent) >= self.refuse_after:
            raise OverloadedError("full")
        self.sent.append(request)
        return ENGINE

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        self.aborted += [(request_id, sample_index) for request_id in request_ids]

    async def get_output_async(self) -> EngineCoreOutputs:
        item = await self.outputs.get()
        if isinstance(item, Exception):
            raise item
        return item

    def say(self, request: AddRequest, text: str, finish: FinishReason | None = None) -> None:
        output = EngineCoreOutput(request.request_id, request.sample_index, 0, 0, list(text.encode()), finish)
        self.outputs.put_nowait(EngineCoreOutputs(ENGINE, CLIENT, 1, 0, 0, [output]))


@asynccontextmanager
async def facade(client: ScriptedClient, tokenizer: TextTokenizer | None = None) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(cast(Any, client), tokenizer or byte_tokenizer(), ServingStats(), random.Random(1))
    llm.start()
    try:
        yield llm
    finally:
        await llm.aclose()
