"""The queue between callbacks and tasks."""

import asyncio

import pytest

from client.mailbox import Mailbox
from engine.wire.errors import EngineDeadError


async def test_items_come_out_in_order_whether_or_not_somebody_waits() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    reader = asyncio.create_task(_take(mailbox, 3))
    await asyncio.sleep(0)
    mailbox.put(2)
    mailbox.put(3)
    assert await reader == [1, 2, 3]


async def test_a_closed_box_hands_out_what_it_has_and_then_raises_for_ever() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    mailbox.close(EngineDeadError("over"))
    mailbox.close(EngineDeadError("a second reason"))
    assert await mailbox.get() == 1
    for _ in range(3):
        with pytest.raises(EngineDeadError, match="over"):
            await mailbox.get()


async def test_every_waiting_reader_learns_of_the_end() -> None:
    mailbox: Mailbox[int] = Mailbox()
    readers = [asyncio.create_task(_take(mailbox, 1)) for _ in range(3)]
    await asyncio.sleep(0)
    mailbox.close(EngineDeadError("over"))
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results)


async def test_a_cancelled_reader_takes_nothing_with_it() -> None:
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(_take(mailbox, 1))
    await asyncio.sleep(0)
    mailbox.put(7)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert await mailbox.get() == 7


def test_a_box_made_outside_a_loop_works_in_a_later_one() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    assert asyncio.run(_take(mailbox, 1)) == [1]


def test_drain_takes_each_item_out_before_it_hands_it_over() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for item in (1, 2, 3):
        mailbox.put(item)
    for item in mailbox.drain():
        assert len(mailbox) == 3 - item


async def _take(mailbox: Mailbox[int], count: int) -> list[int]:
    return [await mailbox.get() for _ in range(count)]
