"""SIGTERM, Ctrl-C and a closed terminal: the first asks for an ordered stop, the second for one at once.

One request to stop often arrives as two signals in a row (``timeout`` and some process managers signal both the process
and its group), so what follows the first within ``SAME_SIGNAL_S`` belongs to it.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

SAME_SIGNAL_S = 0.25

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Two futures, each resolved with the signal that came. ``now``: a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[signal.Signals] = loop.create_future()
        self.second: asyncio.Future[signal.Signals] = loop.create_future()
        self._now = now
        self._first_at = 0.0

    def install(self) -> None:
        """Take the signals over; again after a library has taken them for itself."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def uninstall(self) -> None:
        """Take no more signals: all that is left is to say how it ended, and none of them shall change that."""
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: signal.Signals) -> None:
        now = self._now()
        if not self.first.done():
            _LOG.info("%s: stopping; once more stops at once", signal.Signals(number).name)
            self._first_at = now
            self.first.set_result(number)
        elif not self.second.done() and now - self._first_at > SAME_SIGNAL_S:
            _LOG.warning("%s again: stopping at once", signal.Signals(number).name)
            self.second.set_result(number)
