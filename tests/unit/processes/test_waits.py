"""Waiting for one of several ends."""

import asyncio
from typing import Any

import pytest

from orchestrator.processes.waits import run_unless, wait_all


def future(result: Any = None, *, done: bool = False) -> "asyncio.Future[Any]":
    made = asyncio.get_running_loop().create_future()
    if done:
        made.set_result(result)
    return made


async def test_work_that_ends_first_is_reported_so_and_its_exception_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    assert await run_unless(asyncio.sleep(0), future())
    with pytest.raises(ValueError, match="broken"):
        await run_unless(fail(), future())


async def test_an_event_cancels_the_work_and_waits_for_its_end() -> None:
    event, ended = future(), False

    async def work() -> None:
        nonlocal ended
        try:
            event.set_result(None)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended = True

    assert not await run_unless(work(), event)
    assert ended


async def test_a_cancel_of_the_caller_reaches_the_work() -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    caller = asyncio.create_task(run_unless(work(), future()))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_all_are_waited_for_and_none_is_cancelled() -> None:
    first, second = future(done=True), future()
    assert await wait_all([first], 60)
    assert not await wait_all([first, second], 0)
    assert not await wait_all([second], 60, future(done=True))
    asyncio.get_running_loop().call_soon(second.set_result, None)
    assert await wait_all([first, second], 60, future())
