"""Looking again and again, because what is waited for comes with reports and nobody announces it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

_PAUSE_S = 0.02  # reports come a few times a second, and a look costs microseconds

Rest = TypeVar("Rest")


async def wait_until_none(
    look: Callable[[], Rest], deadline: float, is_wanted: Callable[[], bool] = lambda: True
) -> Rest:
    """Look until nothing is left to wait for, or it is too late; return what the last look saw.

    look: falsy once nothing is left; called once at least. deadline: by the loop's clock, seconds. is_wanted: false
    ends the wait early.
    """
    loop = asyncio.get_running_loop()
    while (left := look()) and is_wanted() and loop.time() < deadline:  # noqa: ASYNC110 - nobody sets an event
        await asyncio.sleep(_PAUSE_S)
    return left
