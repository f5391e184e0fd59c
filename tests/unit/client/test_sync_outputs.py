"""The queue between a task on the loop and callers in threads: bounded, and nobody waits for ever."""

import asyncio
import queue
from collections.abc import Callable
from typing import Any

from client.sync_mp_client import SyncOutputs
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineCoreOutputs

LIMIT = 4


class Endless:
    """Has a batch whenever it is asked."""

    def __init__(self) -> None:
        self.num_given = 0

    async def get_output_async(self) -> EngineCoreOutputs:
        await asyncio.sleep(0)
        self.num_given += 1
        return EngineCoreOutputs(EngineId(0, 1), ClientId(0, 1), self.num_given, 0, 0, [])


def call_now(act: Callable[[], Any]) -> None:
    act()


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def end(filling: "asyncio.Task[None]") -> None:
    filling.cancel()
    await asyncio.wait([filling])


async def test_no_more_is_taken_until_half_of_it_has_been_read() -> None:
    outputs, client = SyncOutputs(LIMIT), Endless()
    filling = asyncio.create_task(outputs.fill(client.get_output_async))
    await turns()
    assert (len(outputs), client.num_given) == (LIMIT, LIMIT)
    outputs.get(0, call_now)
    await turns()
    assert client.num_given == LIMIT
    outputs.get(0, call_now)
    await turns()
    assert (len(outputs), client.num_given) == (LIMIT, LIMIT + 2)
    await end(filling)


async def test_a_reader_that_takes_all_before_it_is_waited_for_is_not_waited_for() -> None:
    outputs, client = SyncOutputs(LIMIT), Endless()

    class ReadBehindTheLook(queue.Queue[Any]):
        """Another thread reads everything between the look at the size and what is done about it."""

        looked = False

        def qsize(self) -> int:
            size = super().qsize()
            if size == LIMIT and not self.looked:
                self.looked = True
                for _ in range(size):
                    outputs.get(0, call_now)
            return size

    outputs._queue = ReadBehindTheLook()
    filling = asyncio.create_task(outputs.fill(client.get_output_async))
    await turns()
    assert client.num_given > LIMIT
    await end(filling)
