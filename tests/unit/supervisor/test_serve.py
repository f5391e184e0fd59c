"""When signals ask for an ordered stop and when for one at once."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.supervisor.serve import SAME_SIGNAL_S, StopSignals


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def _installed(clock: _Clock) -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signals = StopSignals(clock)
    signals.install()
    try:
        yield signals
    finally:
        signals.uninstall()
        ignored = {number: signal.getsignal(number) for number in before}
        for number, handler in before.items():
            signal.signal(number, handler)
    assert set(ignored.values()) == {signal.SIG_IGN}, "what comes at the very end changes nothing any more"


async def _deliver(number: signal.Signals) -> None:
    """Send a signal to this process and let the loop handle it: the probe's handler runs behind the one under test."""
    handled = asyncio.Event()
    os.kill(os.getpid(), number)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, handled.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await handled.wait()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)


async def test_the_first_signal_asks_for_an_ordered_stop() -> None:
    with _installed(_Clock()) as signals:
        await _deliver(signal.SIGINT)
        assert signals.first.result() == signal.SIGINT
        assert not signals.second.done()


async def test_a_signal_sent_to_the_process_and_to_its_group_is_one_request() -> None:
    clock = _Clock()
    with _installed(clock) as signals:
        await _deliver(signal.SIGTERM)
        clock.now += SAME_SIGNAL_S
        await _deliver(signal.SIGTERM)
        assert not signals.second.done()


async def test_a_later_second_signal_asks_for_a_stop_at_once() -> None:
    clock = _Clock()
    with _installed(clock) as signals:
        await _deliver(signal.SIGTERM)
        clock.now += SAME_SIGNAL_S + 0.01
        await _deliver(signal.SIGINT)
        assert signals.second.result() == signal.SIGINT
