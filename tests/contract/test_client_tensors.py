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
MAX_AT_ENGINE = 3
"""Tensors that a socket with room for one message may have taken already: queued, being read, being handed over."""


def with_tensor(client: DPLBAsyncMPClient, memory: memoryview, offset: int) -> AddRequest:
    request = make_request(client)
    request.prompt_embeds = Tensor("uint8", (1, TENSOR_BYTES), memory[offset : offset + TENSOR_BYTES])
    return request


async def _send_until_refused(client: DPLBAsyncMPClient, memory: memoryview) -> list[int]:
    """Return where in the memory the tensors begin that were accepted."""
    offsets: list[int] = []
    for offset in range(0, TENSOR_BYTES, 4099):
        try:
            await client.add_request_async(with_tensor(client, memory, offset))
        except OverloadedError:
            return offsets
        offsets.append(offset)
    pytest.fail("nothing was refused")


async def test_a_slow_engine_costs_no_copies_and_gets_every_byte() -> None:
    """Far more is sent than may be copied; what the table cannot take is refused, and flows again once it is read."""
    memory = memoryview(bytearray(random.Random(1).randbytes(2 * TENSOR_BYTES)))
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        engine = group.open_engine(high_water_mark=1)
        engine.say_ready()
        try:
            await client.wait_ready(DEADLINE_S)
            before = psutil.Process().memory_info().rss
            offsets = await _send_until_refused(client, memory)
            assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
            assert NUM_TENSORS <= len(offsets) <= NUM_TENSORS + MAX_AT_ENGINE
            assert len(offsets) - MAX_AT_ENGINE <= client.statistics()["pending_messages"] <= NUM_TENSORS
            num_read = 0

            def is_over() -> bool:
                return num_read == len(offsets) and not client.statistics()["pending_messages"]

            while not is_over():
                await eventually(lambda: engine.channel.poll(0) or is_over())
                if not engine.channel.poll(0):
                    continue
                message = channel_decoder().decode_frames(receive_nowait(engine.channel))
                assert isinstance(message, AddRequest)
                assert message.prompt_embeds is not None
                offset = offsets[message.channel_seq - 1]
                assert message.prompt_embeds.data == memory[offset : offset + TENSOR_BYTES]
                # Applied at once, or a busy machine would send everything again; what it did send again is read too.
                num_read = max(num_read, message.channel_seq)
                engine.say(applied=num_read)
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
