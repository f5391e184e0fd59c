"""The event loop's lag, on a loop whose clock the test turns."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from metrics.loop_lag import LoopLag


class TurnedLoop:
    """An event loop's clock and timers, as far as LoopLag uses them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timer: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        self.timer = (when, callback)
        return self

    def cancel(self) -> None:
        self.timer = None

    def wake(self, delay_s: float = 0.0) -> None:
        """Let the next timer come that much late."""
        assert self.timer is not None
        when, callback = self.timer
        self.now = when + delay_s
        callback()


def started() -> tuple[TurnedLoop, LoopLag]:
    loop = TurnedLoop()
    return loop, LoopLag(cast(asyncio.AbstractEventLoop, loop))


def test_the_worst_delay_is_kept_for_ten_seconds_and_forgotten_after_twenty() -> None:
    loop, lag = started()
    loop.wake(delay_s=0.5)
    stalled_at = loop.now
    while loop.now < stalled_at + 10:
        loop.wake()
        assert lag.worst_s() == 0.5
    while loop.now < stalled_at + 20.5:
        loop.wake()
    assert lag.worst_s() == 0.0


def test_nothing_is_scheduled_after_close() -> None:
    loop, lag = started()
    lag.close()
    lag.close()
    assert loop.timer is None
