"""Task bodies that work for an owner without keeping it alive."""

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from client.mailbox import Mailbox

_log = logging.getLogger(__name__)

C = TypeVar("C")


def loop_is_running() -> bool:
    """Tell whether the caller runs inside an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def whenever_filled(owner_ref: "weakref.ref[C]", mailbox: Mailbox[Any], act: Callable[[C], None]) -> None:
    """Call ``act(owner)``, which empties the mailbox, whenever something is in it; return when the owner is gone.

    The owner is held only during the call: a task that held it while waiting would keep it from being collected.
    """
    while True:
        await mailbox.wait()
        owner = owner_ref()
        if owner is None:
            return
        act(owner)
        del owner


async def every(period_s: float, owner_ref: "weakref.ref[C]", act: Callable[[C], None]) -> None:
    """Call ``act(owner)`` now and every ``period_s`` seconds; return when the owner is gone."""
    while True:
        owner = owner_ref()
        if owner is None:
            return
        act(owner)
        del owner
        await asyncio.sleep(period_s)


def log_failure(task: "asyncio.Task[None]") -> None:
    """Observe how a task ended that nobody awaits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed", task.get_name(), exc_info=error)
