"""The start of a deployment: its parts, bottom up, each made when what it needs exists.

Host, coordinator, engines, control channel and scaler, API processes; it ends when all ranks are ready and every API
process reaches them.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.wire.endpoints import ipc_endpoint
from engine.wire.errors import ShoalError, StartupError
from engine.wire.ids import ClientId
from orchestrator.config.defaults import MAX_RANKS
from orchestrator.config.engine_config import engine_config
from orchestrator.config.serve_config import ServeConfig
from orchestrator.control.cluster import ClusterControl
from orchestrator.launch.host import EngineHost, OpenHost
from orchestrator.processes.restarts import RestartRule
from orchestrator.processes.tokenizer_export import find_tokenizer
from orchestrator.ranks.coordinator_channel import CoordinatorChannel
from orchestrator.ranks.engine_group import EngineGroup
from orchestrator.ranks.progress import StartProgress, start_progress
from orchestrator.ranks.replica_table import Replica, ReplicaTable
from orchestrator.scaling.operations import ScaleOperations
from orchestrator.scaling.plan import ScaleLimits
from orchestrator.scaling.scaler import Scaler
from orchestrator.scaling.service import ScaleService
from orchestrator.scaling.steps import ScaleDeadlines
from orchestrator.supervisor.api_group import ApiGroup
from orchestrator.supervisor.coordinator_supervisor import CoordinatorSupervisor
from orchestrator.supervisor.endpoints import Endpoints, choose_endpoints, choose_security
from orchestrator.supervisor.preflight import Preflight
from orchestrator.supervisor.specs import Wiring, api_spec, coordinator_spec, engine_spec

ForceStop = asyncio.Future[Any]
"""Done once nobody is to be waited for any more."""

Stop = Callable[[ForceStop], Awaitable[list[str]]]
"""Ends one part and returns one line for each thing that did not end by itself."""


def pass_on(line: str) -> None:
    """Write one line of a child's log to standard error, above whatever is drawn there."""
    sys.stderr.write(line + "\n")


class Startup:
    """Starts the parts of one deployment.

    replicas: of all ranks; nothing is in them yet. on_death: called with the replica of every engine that ended.
    on_failure: called with what makes the deployment end by itself. stops: gets how to end each part, in the order of
    their start, also of those that a start which fails half-way has made.
    """

    def __init__(
        self,
        config: ServeConfig,
        preflight: Preflight,
        open_host: OpenHost,
        replicas: ReplicaTable,
        on_death: Callable[[Replica], None],
        on_failure: Callable[[ShoalError], None],
        stops: list[Stop],
    ) -> None:
        self._config = config
        self._preflight = preflight
        self._open_host = open_host
        self._replicas = replicas
        self._on_death = on_death
        self._on_failure = on_failure
        self._stops = stops
        self._doing = "preparing"
        self._has_engines = False

    async def run(self) -> EngineGroup:
        """Start every process and wait until all ranks and the API are ready; return the ranks.

        Raises:
            StartupError: something cannot start or is not ready within ``start_timeout``; names it.
        """
        with start_progress(self._config.data_parallel_size) as progress:
            try:
                async with asyncio.timeout(self._config.start_timeout):
                    return await self._start_parts(progress)
            except TimeoutError as error:
                raise StartupError(self._describe_timeout()) from error

    async def _start_parts(self, progress: StartProgress) -> EngineGroup:
        num_ranks, model = self._config.data_parallel_size, self._preflight.model
        self._show(progress, f"reserving places for {num_ranks} rank(s)")
        site = await self._open_host(num_ranks, "cpu" if model is None else self._config.device)
        self._stops.append(site.host.stop)
        engine = engine_config(self._config, model, site.device)
        run_dir = self._preflight.run_dir.path
        wiring = await self._start_coordinator(
            choose_endpoints(run_dir, site.address, self._config.interface, self._config.port_range)
        )
        engines = self._make_engines(site.host, engine, wiring, progress)
        control = self._make_control(site.host, engines)
        # After the control channel: the spec of an engine holds the settings of that moment.
        await engines.start()
        self._show(progress, "preparing the tokenizer and the API processes")
        # While the engines load: an export takes seconds.
        tokenizer_dir = await find_tokenizer(model, pass_on) if model is not None else None
        api = await self._start_api(engine, wiring, tokenizer_dir, control, engines)
        # Waited for last, because loading takes longest and everything else goes on meanwhile.
        await engines.wait_ready()
        self._show(progress, "waiting until every API process reaches every rank")
        await api.wait_reachable(num_ranks)
        return engines

    async def _start_coordinator(self, chosen: Endpoints) -> Wiring:
        security = choose_security(self._config.wire_security, chosen)
        spec = coordinator_spec(self._config, chosen, security)
        coordinator = CoordinatorSupervisor(spec, pass_on, self._on_failure, start_s=self._config.start_timeout)
        # Registered before it is started: a start that fails half-way has something to stop as well.
        self._stops.append(coordinator.stop)
        return Wiring(chosen, (await coordinator.start()).under(chosen.advertise_host), security)

    def _make_engines(
        self, host: EngineHost, engine: EngineConfig, wiring: Wiring, progress: StartProgress
    ) -> EngineGroup:
        engines = EngineGroup(
            self._replicas,
            host,
            lambda replica: engine_spec(
                replica.engine_id,
                engine,
                wiring,
                self._config.log_level,
                self._replicas.settings,
                replica.is_joining,
            ),
            partial(
                CoordinatorChannel,
                wiring.coordinator.report_endpoint,
                wiring.coordinator.state_endpoint,
                security=wiring.security,
            ),
            progress,
            self._on_death,
            load_timeout_s=self._config.start_timeout,
        )
        self._stops.append(engines.stop)
        self._has_engines = True
        return engines

    def _make_control(self, host: EngineHost, engines: EngineGroup) -> ClusterControl:
        config = self._config
        control = ClusterControl(
            ipc_endpoint(self._preflight.run_dir.path, "control"),
            lambda: [replica.engine_id.rank for replica in self._replicas],
            engines.publish_settings,
            config.log_level,
        )
        operations = ScaleOperations(
            ScaleLimits(config.min_data_parallel_size, config.max_data_parallel_size or MAX_RANKS),
            ScaleDeadlines(load_s=config.start_timeout),
            is_lockstep=config.enable_expert_parallel,
        )
        scaler = Scaler(engines, host, operations, control.reached, control.forget_rank)
        # The scaler calls API processes on this channel, and they call it: so its handlers come last.
        control.add_handlers(ScaleService(scaler, engines, config.executor).handlers())
        self._stops += [scaler.stop, control.stop]
        return control

    async def _start_api(
        self,
        engine: EngineConfig,
        wiring: Wiring,
        tokenizer_dir: str | None,
        control: ClusterControl,
        engines: EngineGroup,
    ) -> ApiGroup:
        config, listener, model = self._config, self._preflight.listener, self._preflight.model
        make_spec = partial(api_spec, config, engine, wiring, listener, model, tokenizer_dir)

        def on_client_gone(client_id: ClientId) -> None:
            control.on_client_gone(client_id)
            engines.on_client_gone(client_id)

        api = ApiGroup(
            config.api_server_count,
            partial(make_spec, control_endpoint=control.endpoint),
            RestartRule(max_in_row=config.max_restarts),
            pass_on,
            on_client_gone,
            self._on_failure,
        )
        self._stops.append(api.stop)
        await api.start()
        return api

    def _describe_timeout(self) -> str:
        # Before the engines are ordered the table would report as "starting" what does not start yet.
        unready = self._replicas.describe_unready() if self._has_engines else ""
        return f"not ready within {self._config.start_timeout:g} s (--start-timeout): {unready or self._doing}"

    def _show(self, progress: StartProgress, doing: str) -> None:
        self._doing = doing
        progress.show_step(doing)
