"""The facade over a client that is scripted: what the real one does in rare moments."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from engine.wire.errors import EngineDeadError, InvalidRequestError, OverloadedError
from engine.wire.ids import ClientId, EngineId, RequestIds
from engine.wire.messages import AddRequest, EngineCoreOutput, EngineCoreOutputs, EngineReady, FinishReason
from lb.views import EngineState, EngineView
from metrics.stats import ServingStats
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.params import GenerationParams
from orchestrator.llm.stream import Delta
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
        return [
            EngineView(
                engine_id=ENGINE,
                state=EngineState.READY,
                reason="",
                report=None,
                ready=self.ready,
                seat=None,
                num_in_flight=0,
                load_score=0.0,
                num_picks=0,
            )
        ]

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


async def test_a_prompt_travels_as_ids_and_comes_back_as_text() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["abc"], GenerationParams(max_tokens=2))
        (request,) = client.sent
        assert request.prompt_token_ids == list(b"abc")
        client.say(request, "x")
        client.say(request, "y", FinishReason.LENGTH)
        deltas = [delta async for delta in stream.deltas()]
    assert "".join(delta.text for delta in deltas) == "xy"
    assert deltas[-1].finish_reason == "length"
    assert client.aborted == []


async def test_samples_share_the_request_and_the_seed_but_prompts_do_not() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        await llm.generate(["a", "a"], GenerationParams(n=2, max_tokens=1))
        first, second, third, fourth = client.sent
    assert [request.sample_index for request in client.sent] == [0, 1, 0, 1]
    assert first.request_id == second.request_id != third.request_id == fourth.request_id
    assert first.sampling.seed == second.sampling.seed != third.sampling.seed


async def test_a_refusal_half_way_takes_back_what_was_sent() -> None:
    client = ScriptedClient()
    client.refuse_after = 2
    async with facade(client) as llm:
        with pytest.raises(OverloadedError):
            await llm.generate(["a"], GenerationParams(n=3, max_tokens=1))
        assert llm.num_open == 0
    request_id = client.sent[0].request_id
    assert {(request_id, 0), (request_id, 1)} <= set(client.aborted)


async def test_a_stop_string_aborts_that_sample_on_its_engine() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["a"], GenerationParams(n=2, max_tokens=9, stop=("!",)))
        first, second = client.sent
        client.say(second, "x!")
        client.say(first, "y", FinishReason.LENGTH)
        deltas = {delta.index: delta async for delta in stream.deltas()}
    assert deltas == {0: Delta(0, "y", "length"), 1: Delta(1, "x", "stop")}
    assert client.aborted == [(second.request_id, 1)]


async def test_closing_ends_every_open_stream_with_abort() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["a"], GenerationParams(max_tokens=9))
    assert [delta.finish_reason async for delta in stream.deltas()] == ["abort"]
    assert client.aborted == [(client.sent[0].request_id, 0)]


async def test_the_end_of_the_line_fails_every_stream_and_is_seen() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["a"], GenerationParams(max_tokens=9))
        client.outputs.put_nowait(EngineDeadError("cut"))
        await llm.wait_closed()
        with pytest.raises(EngineDeadError, match="cut"):
            await anext(aiter(stream.deltas()))


async def test_an_unforeseen_end_of_the_output_loop_fails_every_stream_too() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["a"], GenerationParams(max_tokens=9))
        client.outputs.put_nowait(RuntimeError("bug"))
        await llm.wait_closed()
        with pytest.raises(EngineDeadError, match="bug"):
            await anext(aiter(stream.deltas()))


async def test_before_the_first_engine_there_is_no_room() -> None:
    client = ScriptedClient()
    client.ready = None
    async with facade(client) as llm:
        with pytest.raises(OverloadedError):
            await llm.generate(["a"], GenerationParams())


@pytest.mark.parametrize("prompt", ["x" * 50, [256], [-1], [], ""])
async def test_prompts_the_model_cannot_take_are_refused_by_field(prompt: str | list[int]) -> None:
    async with facade(ScriptedClient()) as llm:
        with pytest.raises(InvalidRequestError) as caught:
            await llm.generate([prompt], GenerationParams())
    assert caught.value.field == "prompt"


async def test_a_model_without_a_template_does_not_chat() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    async with facade(ScriptedClient(), tokenizer) as llm:
        with pytest.raises(InvalidRequestError, match="completions"):
            await llm.chat([{"role": "user", "content": "hi"}], GenerationParams())
