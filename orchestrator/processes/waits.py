"""Helpers that wait for the first of several events, and leave nothing running behind."""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any


async def run_unless(work: Coroutine[Any, Any, None], *events: "asyncio.Future[Any]") -> bool:
    """Run ``work`` until it ends or one of ``events`` happens; then cancel it. Returns whether ``work`` ended.

    An exception of ``work`` is raised. A cancel of the caller cancels ``work`` too.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, *events], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            # Waited for, not only cancelled: its clean-up must be over before the caller begins to stop things.
            task.cancel()
            await asyncio.wait([task])
    if task.cancelled():
        return False
    task.result()
    return True


async def wait_all(
    futures: "Collection[asyncio.Future[Any]]", timeout_s: float, *events: "asyncio.Future[Any]"
) -> bool:
    """Wait until all ``futures`` are done, ``timeout_s`` has passed or one of ``events`` happens; cancels none of them.

    Returns whether all are done.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while pending := [future for future in futures if not future.done()]:
        left_s = deadline - loop.time()
        if left_s <= 0 or any(event.done() for event in events):
            return False
        # The futures are not cancelled at the timeout: their owners wait for them as well.
        await asyncio.wait([*pending, *events], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    return True
