"""Tensors on real sockets: a reader that is slow, and a line that loses them."""

import asyncio
import random

import psutil
import pytest

from client.dplb_async_mp_client import DPLBAsyncMPClient
from client.engine_connection import RESEND_AFTER_S
from engine.wire.codec import channel_decoder
from engine.wire.errors import OverloadedError
from engine.wire.messages import AddRequest
from engine.wire.sockets import receive_nowait
from engine.wire.tensors import Tensor
from engine.wire.tracked import MAX_PENDING_BYTES
from tests.contract.deployment import DEADLINE_S
from tests.contract.puppets import eventually, make_request, puppet_client, puppets

TENSOR_BYTES = 16 * 1024 * 1024
NUM_TENSORS = MAX_PENDING_BYTES // TENSOR_BYTES
MAX_GROWTH_BYTES = 8 * TENSOR_BYTES


def with_tensor(client: DPLBAsyncMPClient, memory: memoryview, offset: int) -> AddRequest:
    request = make_request(client)
    request.prompt_embeds = Tensor("uint8", (1, TENSOR_BYTES), memory[offset : offset + TENSOR_BYTES])
    return request


async def test_a_slow_engine_costs_no_copies_and_gets_every_byte() -> None:
    """Far more is sent than may be copied; what the table cannot take is refused, and flows again once it is read."""
    memory = memoryview(bytearray(random.Random(1).randbytes(2 * TENSOR_BYTES)))
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        engine = group.open_engine(high_water_mark=1)
        engine.say_ready()
        try:
            await client.wait_ready(DEADLINE_S)
            before, offsets = psutil.Process().memory_info().rss, [number * 4099 for number in range(NUM_TENSORS)]
            for offset in offsets:
                await client.add_request_async(with_tensor(client, memory, offset))
            with pytest.raises(OverloadedError):
                await client.add_request_async(with_tensor(client, memory, 0))
            assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
            assert client.statistics()["pending_messages"] == NUM_TENSORS
            for offset in offsets:
                assert await eventually(lambda: engine.channel.poll(0))
                message = channel_decoder().decode_frames(receive_nowait(engine.channel))
                assert isinstance(message, AddRequest)
                assert message.prompt_embeds is not None
                assert message.prompt_embeds.data == memory[offset : offset + TENSOR_BYTES]
            await eventually(lambda: client.statistics()["pending_messages"] == 0)
        finally:
            await client.aclose()


async def test_a_request_with_a_tensor_that_was_lost_is_sent_again_whole() -> None:
    memory = memoryview(random.Random(2).randbytes(TENSOR_BYTES))
    async with puppet_client() as (client, _, (engine,)):
        request = with_tensor(client, memory, 0)
        await client.add_request_async(request)
        started = asyncio.get_running_loop().time()
        for _ in range(2):  # the first is lost: nobody applies it
            message = channel_decoder().decode_frames(await eventually(engine.receive_frames))
            assert isinstance(message, AddRequest)
            assert (message.channel_seq, message.prompt_embeds) == (1, request.prompt_embeds)
        assert asyncio.get_running_loop().time() - started > RESEND_AFTER_S / 2
        await eventually(lambda: client.statistics()["pending_messages"] == 0)
