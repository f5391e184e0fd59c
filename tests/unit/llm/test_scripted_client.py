"""The contract of a client as the facade needs it: the scripted fake and the real client in one process keep it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import pytest

from client.core_client import GroupClient
from client.inproc_client import InprocClient
from engine.wire.errors import EngineDeadError, InvalidRequestError
from engine.wire.messages import AddRequest, EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine.wire.sampling import SamplingParams
from engine.wire.states import EngineState
from tests.unit.client.inproc import inproc_client
from tests.unit.llm.scripted_client import ScriptedClient


class Engines(Protocol):
    """What is behind a client, as the contract plays with it."""

    client: GroupClient

    def run(self, *requests: AddRequest) -> None:
        """Let sequences run to their end, by length."""

    async def close(self) -> None:
        """Close the client; nothing more will come."""


class RealEngines(Engines):
    """Sim engines in threads, which run by themselves."""

    def __init__(self, client: InprocClient) -> None:
        self.client = self._real = client

    def run(self, *requests: AddRequest) -> None:
        """They do already."""

    async def close(self) -> None:
        await self._real.aclose()


class ScriptedEngines(Engines):
    """Run when the test says so."""

    def __init__(self) -> None:
        self.client = self._fake = ScriptedClient()

    def run(self, *requests: AddRequest) -> None:
        for request in requests:
            if (request.request_id, request.sample_index) not in self._fake.aborted:
                self._fake.say(request, "x" * request.sampling.max_tokens, FinishReason.LENGTH)

    async def close(self) -> None:
        self._fake.end()


@asynccontextmanager
async def real() -> AsyncIterator[Engines]:
    async with inproc_client() as client:
        yield RealEngines(client)


@asynccontextmanager
async def scripted() -> AsyncIterator[Engines]:
    yield ScriptedEngines()


MakeEngines = Callable[[], AbstractAsyncContextManager[Engines]]
either = pytest.mark.parametrize("make", [real, scripted])


def a_request(
    client: GroupClient, sample_index: int = 0, request_id: int | None = None, max_tokens: int = 4
) -> AddRequest:
    return AddRequest(
        client_id=client.client_id,
        channel_seq=0,
        request_id=client.request_ids.draw() if request_id is None else request_id,
        sample_index=sample_index,
        attempt=0,
        prompt_token_ids=[1, 2, 3],
        output_token_ids=[],
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
    )


async def read_until_end(client: GroupClient, *requests: AddRequest) -> tuple[list[EngineCoreOutputs], set[int]]:
    """Read until each of these sequences has ended; return the batches and the samples that ended by length."""
    names = {(request.request_id, request.sample_index) for request in requests}
    batches: list[EngineCoreOutputs] = []
    ends: list[EngineCoreOutput] = []
    while not names <= {(output.request_id, output.sample_index) for output in ends}:
        batches.append(await client.get_output_async())
        ends += [output for output in batches[-1].outputs if output.finish_reason is not None]
    return batches, {end.sample_index for end in ends if end.finish_reason is FinishReason.LENGTH}


@either
async def test_a_request_goes_to_a_ready_engine_and_comes_back_under_its_name(make: MakeEngines) -> None:
    async with make() as engines:
        client = engines.client
        (view,) = client.engine_views()
        assert view.state is EngineState.READY
        assert view.ready is not None
        request = a_request(client)
        assert await client.add_request_async(request) == view.engine_id
        engines.run(request)
        batches, _ = await read_until_end(client, request)
    outputs = [output for batch in batches for output in batch.outputs]
    assert {(batch.engine_id, batch.client_id) for batch in batches} == {(view.engine_id, client.client_id)}
    assert {(output.request_id, output.sample_index) for output in outputs} == {(request.request_id, 0)}
    assert sum(len(output.new_token_ids) for output in outputs) == 4
    assert [output.finish_reason for output in outputs][-1] is FinishReason.LENGTH


@either
async def test_a_rank_that_is_not_there_is_refused_by_field(make: MakeEngines) -> None:
    async with make() as engines:
        with pytest.raises(InvalidRequestError, match="valid: ") as refused:
            await engines.client.add_request_async(a_request(engines.client), data_parallel_rank=9)
    assert refused.value.field == "data_parallel_rank"


@either
async def test_an_abort_of_one_sample_leaves_its_siblings_and_an_unknown_one_does_nothing(make: MakeEngines) -> None:
    async with make() as engines:
        client = engines.client
        first = a_request(client)
        second = a_request(client, 1, first.request_id, max_tokens=5_000)
        for request in (first, second):
            await client.add_request_async(request)
        await client.abort_requests_async([second.request_id], 1)
        await client.abort_requests_async([12345])
        engines.run(first, second)
        _, ended = await read_until_end(client, first)
    assert ended == {0}


@either
async def test_request_ids_are_drawn_once_and_statistics_are_numbers(make: MakeEngines) -> None:
    async with make() as engines:
        drawn = [engines.client.request_ids.draw() for _ in range(5)]
        assert len(set(drawn)) == 5
        assert all(isinstance(value, int) for value in engines.client.statistics().values())


@either
async def test_after_the_end_every_read_raises(make: MakeEngines) -> None:
    async with make() as engines:
        await engines.close()
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await engines.client.get_output_async()
