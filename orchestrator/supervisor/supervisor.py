"""The life of a deployment: start, serve, stop. Owns every process of it and outlives them all."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.wire.endpoints import ipc_endpoint
from engine.wire.errors import EngineError, ShoalError, StartupError
from engine.wire.ids import ClientId, EngineId
from lb.coordinator.config import CoordinatorSpec, LockstepConfig
from orchestrator.config.engine_config import engine_config
from orchestrator.config.serve_config import ServeConfig
from orchestrator.control.cluster import ClusterControl
from orchestrator.launch.host import EngineHost
from orchestrator.processes.restarts import RestartRule
from orchestrator.processes.tokenizer_export import find_tokenizer
from orchestrator.ranks.engine_group import EngineGroup
from orchestrator.ranks.progress import StartProgress, start_progress
from orchestrator.ranks.replica_table import Replica
from orchestrator.scaling.operations import ScaleOperations
from orchestrator.scaling.plan import MAX_RANKS, ScaleLimits
from orchestrator.scaling.scaler import Scaler
from orchestrator.scaling.service import ScaleService
from orchestrator.scaling.steps import ScaleDeadlines
from orchestrator.supervisor.api_group import ApiGroup
from orchestrator.supervisor.banner import print_banner
from orchestrator.supervisor.coordinator_supervisor import CoordinatorSupervisor
from orchestrator.supervisor.endpoints import Endpoints, choose_endpoints, choose_security
from orchestrator.supervisor.preflight import Preflight
from orchestrator.supervisor.specs import Wiring, api_spec, engine_spec, served_model_name

_LOG = logging.getLogger(__name__)

ForceStop = asyncio.Future[Any]
"""Done once nobody is to be waited for any more."""

Stop = Callable[[ForceStop], Awaitable[list[str]]]
"""Ends one part and returns one line for each thing that did not end by itself."""


class Supervisor:
    """One deployment. Its three methods are called once and in order, ``stop`` in any case.

    failure: resolved once with what makes the deployment end by itself; never after ``stop`` has begun.
    """

    def __init__(self, config: ServeConfig, preflight: Preflight, host: EngineHost) -> None:
        self.failure: asyncio.Future[ShoalError] = asyncio.get_running_loop().create_future()
        self._config = config
        self._preflight = preflight
        self._host = host
        self._engines: EngineGroup | None = None
        self._control: ClusterControl | None = None
        self._doing = "preparing"
        self._is_serving = False
        self._is_stopping = False
        # How to end each part, in the order of their start; ended in reverse.
        self._stops: list[Stop] = [preflight.stop, host.stop]

    async def start(self) -> None:
        """Start every process, bottom up, and wait until all ranks and the API are ready.

        Raises:
            StartupError: something cannot start or is not ready within ``start_timeout``; names it.
        """
        with start_progress(self._config.data_parallel_size) as progress:
            try:
                async with asyncio.timeout(self._config.start_timeout):
                    await self._start_parts(progress)
            except TimeoutError as error:
                raise StartupError(self._describe_timeout()) from error

    async def serve(self) -> None:
        """Say that the deployment is ready; from here on its processes work alone until ``failure`` or a signal."""
        assert self._engines is not None
        self._is_serving = True
        self._engines.start_replacing()
        listener = self._preflight.listener
        self._preflight.run_dir.write_run_file(listener.url)
        print_banner(listener.url, self._model_name, self._config.data_parallel_size)
        await asyncio.wait([self.failure])

    async def stop(self, force_stop: ForceStop) -> None:
        """End every part, top down, and log what did not end by itself."""
        self._is_stopping = True
        self._preflight.listener.close()  # the queue of the port ends with the last process that takes from it
        leftovers: list[str] = []
        while self._stops:
            try:
                leftovers += await self._stops.pop()(force_stop)
            except Exception as error:  # noqa: BLE001 - a part that cannot stop must not keep the rest alive
                leftovers.append(f"a part did not stop: {error!r}")
        for leftover in leftovers:
            _LOG.warning("%s", leftover)
        _LOG.info("stopped%s", "" if leftovers else ": every process ended by itself, nothing is left behind")

    async def _start_parts(self, progress: StartProgress) -> None:
        num_ranks, model = self._config.data_parallel_size, self._preflight.model
        self._say(progress, f"reserving places for {num_ranks} rank(s)")
        site = await self._host.open(num_ranks, "cpu" if model is None else self._config.device)
        engine = engine_config(self._config, model, site.device)
        wiring = await self._start_coordinator(
            choose_endpoints(
                self._preflight.run_dir.path, site.address, self._config.interface, self._config.port_range
            )
        )
        engines = await self._start_engines(engine, wiring, progress)
        self._say(progress, "preparing the tokenizer and the API processes")
        tokenizer_dir = await find_tokenizer(model, pass_on) if model is not None else None
        api = await self._start_api(engine, wiring, tokenizer_dir)
        await engines.wait_ready()
        self._say(progress, "waiting until every API process reaches every rank")
        await api.wait_reachable(num_ranks)

    async def _start_coordinator(self, chosen: Endpoints) -> Wiring:
        security = choose_security(self._config.wire_security, chosen)
        spec = CoordinatorSpec(
            generation=1,
            report_endpoint=chosen.report,
            state_endpoint=chosen.state,
            stall_timeout_s=self._config.stall_timeout,
            log_level=self._config.log_level,
            security=security,
            lockstep=_lockstep(self._config),
        )
        coordinator = CoordinatorSupervisor(spec, pass_on, self._fail, start_s=self._config.start_timeout)
        self._stops.append(coordinator.stop)
        return Wiring(chosen, (await coordinator.start()).under(chosen.advertise_host), security)

    async def _start_engines(self, engine: EngineConfig, wiring: Wiring, progress: StartProgress) -> EngineGroup:
        rule = RestartRule(max_in_row=self._config.max_restarts)
        engines = EngineGroup(
            self._config.data_parallel_size,
            rule,
            self._host,
            progress,
            self._on_engine_death,
            load_timeout_s=self._config.start_timeout,
        )
        self._engines = engines
        self._stops.append(engines.stop)
        engines.connect(wiring.coordinator, wiring.security)
        control = self._control = self._start_control(engines, self._make_scaler(engines))
        level = self._config.log_level
        await engines.start(lambda engine_id: engine_spec(engine_id, engine, wiring, level, control.settings))
        return engines

    def _make_scaler(self, engines: EngineGroup) -> Scaler:
        config = self._config
        operations = ScaleOperations(
            ScaleLimits(config.min_data_parallel_size, config.max_data_parallel_size or MAX_RANKS),
            ScaleDeadlines(load_s=config.start_timeout),
            is_lockstep=config.enable_expert_parallel,
        )
        scaler = Scaler(engines, self._host, operations, self._reached, self._on_rank_left)
        self._stops.append(scaler.stop)
        return scaler

    def _on_rank_left(self, rank: int) -> None:
        assert self._control is not None
        self._control.forget_rank(rank)

    async def _reached(self) -> set[EngineId]:
        assert self._control is not None
        return await self._control.reached()

    def _start_control(self, engines: EngineGroup, scaler: Scaler) -> ClusterControl:
        control = ClusterControl(
            ipc_endpoint(self._preflight.run_dir.path, "control"),
            lambda: [replica.engine_id.rank for replica in engines.replicas],
            engines.publish_settings,
            self._config.log_level,
            ScaleService(scaler, engines, self._config.executor).handlers(),
        )
        self._stops.append(control.stop)
        return control

    async def _start_api(self, engine: EngineConfig, wiring: Wiring, tokenizer_dir: str | None) -> ApiGroup:
        assert self._control is not None
        config, listener, model = self._config, self._preflight.listener, self._preflight.model
        told = partial(api_spec, config, engine, wiring, listener, model, tokenizer_dir)
        api = ApiGroup(
            config.api_server_count,
            partial(told, control_endpoint=self._control.endpoint),
            RestartRule(max_in_row=config.max_restarts),
            pass_on,
            self._on_client_gone,
            self._fail,
        )
        self._stops.append(api.stop)
        await api.start()
        return api

    @property
    def _model_name(self) -> str:
        return served_model_name(self._config, self._preflight.model)

    def _describe_timeout(self) -> str:
        unready = self._engines.replicas.describe_unready() if self._engines is not None else ""
        return f"not ready within {self._config.start_timeout:g} s (--start-timeout): {unready or self._doing}"

    def _say(self, progress: StartProgress, doing: str) -> None:
        self._doing = doing
        progress.say(doing)

    def _on_client_gone(self, client_id: ClientId) -> None:
        assert self._engines is not None
        assert self._control is not None
        self._control.on_client_gone(client_id)
        self._engines.on_client_gone(client_id)

    def _on_engine_death(self, replica: Replica) -> None:
        assert self._engines is not None
        what = f"rank {replica.engine_id.rank} (engine {replica.engine_id})"
        if not self._is_serving:
            self._fail(StartupError(f"{what} ended while it started: {replica.end_reason}"))
            return
        _LOG.error("%s is dead: %s; %s", what, replica.end_reason, self._describe_restart(replica))
        if self._engines.replicas.all_lost:
            self._fail(EngineError(f"every engine is dead: {self._engines.replicas.describe_unready()}"))

    def _describe_restart(self, replica: Replica) -> str:
        if replica.replacement_in_s is None:
            return f"it stays so after {replica.history.restarts.num_in_row} restarts in a row (--max-restarts)"
        count = f"restart {replica.history.restarts.num_in_row} of {self._config.max_restarts} in a row"
        return (
            f"starting it again {f'in {replica.replacement_in_s:g} s' if replica.replacement_in_s else 'now'} ({count})"
        )

    def _fail(self, error: ShoalError) -> None:
        if not self._is_stopping and not self.failure.done():
            self.failure.set_result(error)


def _lockstep(config: ServeConfig) -> LockstepConfig | None:
    if not config.enable_expert_parallel:
        return None
    return LockstepConfig(min_size=config.min_data_parallel_size, num_redundant_experts=config.num_redundant_experts)


def pass_on(line: str) -> None:
    """Write one line of a child's log to standard error, above whatever is drawn there."""
    sys.stderr.write(line + "\n")
