"""The command ``shoal serve``, from its configuration to its exit status, and the signals that stop it."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from functools import partial

from engine.wire.errors import StartupError
from engine.wire.process import configure_logging
from orchestrator.config.serve_config import ServeConfig
from orchestrator.launch.host import OpenHost
from orchestrator.launch.local_host import open_local_host
from orchestrator.launch.ray_environment import prepare_environment
from orchestrator.processes.waits import run_unless
from orchestrator.supervisor.endpoints import is_loopback
from orchestrator.supervisor.preflight import Preflight
from orchestrator.supervisor.run_dir import RunDir
from orchestrator.supervisor.startup import pass_on
from orchestrator.supervisor.supervisor import Supervisor

_LOG = logging.getLogger(__name__)

SAME_SIGNAL_S = 0.25
"""A signal this soon after the first belongs to it."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORCED = 1
_SIGNAL_DELIVERY_S = 0.1


def serve(config: ServeConfig) -> int:
    """Run one deployment until it is stopped. Returns 0 after an ordered stop, else 1.

    Raises:
        ShoalError: it did not come up, or something it cannot do without has died.
    """
    configure_logging("shoal", config.log_level)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request that asks for readiness
    _warn_if_unprotected(config)
    return asyncio.run(_serve(config))


def _warn_if_unprotected(config: ServeConfig) -> None:
    if not is_loopback(config.host) and config.api_key is None and config.admin_api_key is None:
        _LOG.warning(
            "whoever reaches %s may use and administer this deployment: set --api-key and --admin-api-key", config.host
        )


async def _serve(config: ServeConfig) -> int:
    signals = StopSignals()
    signals.install()
    try:
        preflight = Preflight(config)
        supervisor = Supervisor(config, preflight, _choose_host(config, preflight.run_dir))
        await _run(supervisor, signals)
    except StartupError:
        # Ray's own handler may have broken the start off before the loop could deliver the same signal to us.
        await asyncio.wait([signals.first], timeout=_SIGNAL_DELIVERY_S)
        if not signals.first.done():
            raise
    finally:
        signals.uninstall()
    if supervisor.failure.done():
        raise supervisor.failure.result()
    return _FORCED if signals.second.done() else 0


async def _run(supervisor: Supervisor, signals: "StopSignals") -> None:
    try:
        await run_unless(supervisor.run(), signals.first, supervisor.failure)
    finally:
        await supervisor.stop(signals.second)


def _choose_host(config: ServeConfig, run_dir: RunDir) -> OpenHost:
    if config.executor == "local":
        return partial(open_local_host, advertise_host=config.advertise_host, on_line=pass_on)
    if config.ray_address is None:
        prepare_environment(run_dir.path, is_alone=config.advertise_host is None)
    # ray takes 0.6 s and 60 MB to import, which no other command and no local deployment should pay
    from orchestrator.launch.ray_host import open_ray_host

    return partial(
        open_ray_host,
        address=config.ray_address,
        advertise_host=config.advertise_host,
        num_threads=config.num_threads,
        run_dir=run_dir.path,
        on_line=pass_on,
        max_ranks=config.max_data_parallel_size or 1,
    )


class StopSignals:
    """SIGTERM, Ctrl-C and a closed terminal: the first asks for an ordered stop, the second for one at once.

    first, second: resolved with the signal that came. ``now``: a monotonic clock in seconds.
    """

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
        """Ignore the signals from now on: the exit status is decided, and none of them shall change it."""
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: signal.Signals) -> None:
        now = self._now()
        if not self.first.done():
            _LOG.info("%s: stopping; once more stops at once", signal.Signals(number).name)
            self._first_at = now
            self.first.set_result(number)
        # One request to stop often arrives as two signals in a row: ``timeout`` and some process managers signal both
        # the process and its group.
        elif not self.second.done() and now - self._first_at > SAME_SIGNAL_S:
            _LOG.warning("%s again: stopping at once", signal.Signals(number).name)
            self.second.set_result(number)
