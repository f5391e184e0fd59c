"""The lag of an event loop: the worst delay of a periodic timer in the last seconds."""

import asyncio
from collections.abc import Callable

from metrics.shared_status import HEARTBEAT_S

_WINDOW_S = 10.0


class LoopLag:
    """A timer that wakes four times a second and notes how late it was woken.

    The worst of the current and the previous window is kept, so that a scrape every 10 s sees every stall, and several
    scrapers do not take it from each other as they would if a read reset it.

    on_heartbeat: called at every wake-up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_heartbeat: Callable[[], None] = lambda: None) -> None:
        self._loop = loop
        self._on_heartbeat = on_heartbeat
        self._worst_s = self._previous_s = 0.0
        self._window_ends = loop.time() + _WINDOW_S
        self._due = loop.time() + HEARTBEAT_S
        self._timer = loop.call_at(self._due, self._on_timer)

    def worst_s(self) -> float:
        """Return the longest delay of the last 10 to 20 seconds; one that still lasts is not seen."""
        return max(self._worst_s, self._previous_s)

    def close(self) -> None:
        """Stop measuring; idempotent."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        now = self._loop.time()
        if now >= self._window_ends:
            self._previous_s, self._worst_s = self._worst_s, 0.0
            self._window_ends = now + _WINDOW_S
        self._worst_s = max(self._worst_s, now - self._due)
        self._due = now + HEARTBEAT_S
        self._timer = self._loop.call_at(self._due, self._on_timer)
        self._on_heartbeat()
