"""SIGTERM, Ctrl-C and a closed terminal: the first asks for an ordered stop, the second for one at once."""

import asyncio
import logging
import signal

_LOG = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Two futures, each resolved with the signal that came."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[signal.Signals] = loop.create_future()
        self.second: asyncio.Future[signal.Signals] = loop.create_future()

    def install(self) -> None:
        """Take the signals over; again after a library has taken them for itself."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def uninstall(self) -> None:
        """Give the signals back to the system's defaults."""
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.first.done():
            _LOG.info("%s: stopping; once more stops at once", signal.Signals(number).name)
            self.first.set_result(number)
        elif not self.second.done():
            _LOG.warning("%s again: stopping at once", signal.Signals(number).name)
            self.second.set_result(number)
