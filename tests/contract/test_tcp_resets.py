"""Connections between living peers are reset, which ZeroMQ mends without a word: nothing is lost, nothing doubled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from client.dplb_async_mp_client import DPLBAsyncMPClient
from engine.wire.errors import OverloadedError
from engine.wire.messages import AddRequest, EngineCoreOutput, FinishReason
from tests.contract.deployment import DEADLINE_S, Transport, deployment, eventually, finish, make_request
from tests.contract.tcp_relay import RELAY_HOST, TcpRelay

NUM_REQUESTS, NUM_TOKENS, NUM_RESETS = 150, 40, 3


@asynccontextmanager
async def relayed_client(
    num_engines: int, bytes_to_first_reset: int = 0
) -> AsyncIterator[tuple[DPLBAsyncMPClient, dict[str, TcpRelay]]]:
    """Yield a client whose lines go through relays, and these by what they carry.

    bytes_to_first_reset: of the line of requests, 0 for none.
    """
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(deployment(num_engines, transport=Transport.TCP, step_s=0.001))
        client = DPLBAsyncMPClient(msgspec.structs.replace(group.client_config(), advertise_host=RELAY_HOST))
        stack.push_async_callback(client.aclose)
        endpoints = {"requests": client._resources.request_endpoint, "outputs": client._resources.output_endpoint}
        relays = {
            name: await stack.enter_async_context(TcpRelay(int(endpoint.rpartition(":")[2])).running())
            for name, endpoint in endpoints.items()
        }
        relays["requests"].reset_every(bytes_to_first_reset, times=min(1, bytes_to_first_reset))
        await client.wait_ready(DEADLINE_S, num_engines)
        yield client, relays


async def add(client: DPLBAsyncMPClient, request: AddRequest) -> None:
    """Send a request as soon as an engine is connected."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await client.add_request_async(request)
            except OverloadedError:
                await asyncio.sleep(0.01)
            else:
                return


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    """Return the tokens of a sequence, whose outputs must follow each other without a hole and have one end."""
    tokens: list[int] = []
    for output in outputs:
        assert output.first_position == len(tokens)
        tokens += output.new_token_ids
    assert [output.finish_reason for output in outputs[-1:]] == [FinishReason.LENGTH]
    assert all(output.finish_reason is None for output in outputs[:-1])
    return tokens


async def ask_all(client: DPLBAsyncMPClient) -> list[list[int]]:
    """Send requests as fast as they are taken; return what each got."""
    requests = [make_request(client, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed) for seed in range(NUM_REQUESTS)]
    answers = asyncio.create_task(finish(client, *requests))
    for request in requests:
        await add(client, request)
        await asyncio.sleep(0)
    outputs = await answers
    return [tokens_of(outputs[request.request_id]) for request in requests]


@pytest.mark.parametrize(("line", "num_bytes"), [("requests", 3_000), ("outputs", 20_000)])
async def test_resets_at_full_rate_cost_no_request_and_no_token(line: str, num_bytes: int) -> None:
    async with relayed_client(2) as (client, relays):
        unbroken = await ask_all(client)
        relays[line].reset_every(num_bytes, NUM_RESETS)
        assert await ask_all(client) == unbroken
        assert relays[line].num_resets == NUM_RESETS
        assert {len(tokens) for tokens in unbroken} == {NUM_TOKENS}
        assert client.statistics()["in_flight"] == 0


@pytest.mark.parametrize("line", ["requests", "outputs"])
async def test_behind_a_reset_in_silence_the_next_request_is_answered(line: str) -> None:
    async with relayed_client(1) as (client, relays):
        opened = relays[line].num_opened
        relays[line].reset()
        await eventually(lambda: relays[line].num_opened > opened)
        request = make_request(client)
        await add(client, request)
        assert len(tokens_of((await finish(client, request))[request.request_id])) == 8


async def test_a_reset_during_the_handshake_keeps_no_engine_out() -> None:
    async with relayed_client(1, bytes_to_first_reset=180) as (client, relays):
        assert relays["requests"].num_resets == 1
        request = make_request(client)
        await add(client, request)
        assert len(tokens_of((await finish(client, request))[request.request_id])) == 8
