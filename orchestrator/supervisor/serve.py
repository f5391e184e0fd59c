"""``shoal serve`` from its configuration to its exit status."""

import asyncio
import logging

from engine.wire.errors import StartupError
from engine.wire.process import configure_logging
from orchestrator.config.serve_config import ServeConfig
from orchestrator.launch.host import EngineHost
from orchestrator.launch.local_host import LocalHost
from orchestrator.launch.ray_environment import prepare_environment
from orchestrator.processes.waits import run_unless
from orchestrator.supervisor.endpoints import is_loopback
from orchestrator.supervisor.preflight import Preflight
from orchestrator.supervisor.run_dir import RunDir
from orchestrator.supervisor.stop_signals import StopSignals
from orchestrator.supervisor.supervisor import Supervisor, pass_on

_FORCED = 1
_SIGNAL_DELIVERY_S = 0.1


def serve(config: ServeConfig) -> int:
    """Run one deployment until it is told to stop. Returns 0 after an ordered stop, else 1.

    Raises:
        ShoalError: it did not come up, or something it cannot do without has died.
    """
    configure_logging("shoal", config.log_level)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request that asks for readiness
    _warn_of_open_doors(config)
    return asyncio.run(_serve(config))


def _warn_of_open_doors(config: ServeConfig) -> None:
    if not is_loopback(config.host) and config.api_key is None and config.admin_api_key is None:
        logging.getLogger(__name__).warning(
            "whoever reaches %s may use and administer this deployment: set --api-key and --admin-api-key", config.host
        )


async def _serve(config: ServeConfig) -> int:
    signals = StopSignals()
    signals.install()
    try:
        preflight = Preflight(config)
        supervisor = Supervisor(config, preflight, _make_host(config, preflight.run_dir))
        await _live(supervisor, signals)
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


async def _live(supervisor: Supervisor, signals: StopSignals) -> None:
    try:
        if await run_unless(supervisor.start(), signals.first, supervisor.failure):
            await run_unless(supervisor.serve(), signals.first, supervisor.failure)
    finally:
        await supervisor.stop(signals.second)


def _make_host(config: ServeConfig, run_dir: RunDir) -> EngineHost:
    if config.executor == "local":
        return LocalHost(config.advertise_host, pass_on)
    if config.ray_address is None:
        prepare_environment(run_dir.path, is_alone=config.advertise_host is None)
    # ray takes 0.6 s and 60 MB to import, which no other command and no local deployment should pay
    from orchestrator.launch.ray_host import RayHost

    max_ranks = config.max_data_parallel_size or 1
    return RayHost(config.ray_address, config.advertise_host, config.num_threads, run_dir.path, pass_on, max_ranks)
