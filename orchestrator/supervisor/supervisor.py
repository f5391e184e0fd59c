"""The supervisor: one deployment from its start to its stop. It owns every process of it and outlives them all."""

import asyncio
import logging
import os

from rich.console import Console

from engine.wire.errors import EngineError, ShoalError, StartupError
from engine.wire.ids import EngineId
from orchestrator.config.serve_config import ServeConfig
from orchestrator.launch.host import OpenHost
from orchestrator.processes.restarts import RestartRule
from orchestrator.ranks.replica_table import Replica, ReplicaTable
from orchestrator.supervisor.preflight import Preflight
from orchestrator.supervisor.specs import served_model_name
from orchestrator.supervisor.startup import ForceStop, Startup, Stop

_LOG = logging.getLogger(__name__)


class Supervisor:
    """One deployment. ``run`` is called once, and ``stop`` after it in any case.

    failure: resolved once with what makes the deployment end by itself; never after ``stop`` has begun.
    """

    def __init__(self, config: ServeConfig, preflight: Preflight, open_host: OpenHost) -> None:
        self.failure: asyncio.Future[ShoalError] = asyncio.get_running_loop().create_future()
        self._config = config
        self._preflight = preflight
        self._is_stopping = False
        self._replicas = ReplicaTable(
            [EngineId(rank, 1) for rank in range(config.data_parallel_size)],
            RestartRule(max_in_row=config.max_restarts),
        )
        # How to end each part, in the order of their start; ended in reverse.
        self._stops: list[Stop] = [preflight.stop]
        self._startup = Startup(config, preflight, open_host, self._replicas, self._on_death, self._fail, self._stops)

    async def run(self) -> None:
        """Start every process, show that the deployment is ready, and wait for ``failure``.

        Once it is ready its processes work alone: from then on this one acts only when one of them ends, when the
        coordinator publishes a suspect, and on calls of the control channel.

        Raises:
            StartupError: something cannot start or is not ready within ``start_timeout``; names it.
        """
        engines = await self._startup.run()
        engines.start_replacing()
        # Only now: ``shoal status`` takes a run with this file for one that serves.
        url = self._preflight.listener.url
        self._preflight.run_dir.write_run_file(url)
        print_banner(url, served_model_name(self._config, self._preflight.model), self._config.data_parallel_size)
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

    def _on_death(self, replica: Replica) -> None:
        what = f"rank {replica.engine_id.rank} (engine {replica.engine_id})"
        if not self._replicas.replacements:  # before the deployment serves, the death of a rank is its failure
            self._fail(StartupError(f"{what} ended while it started: {replica.end_reason}"))
            return
        _LOG.error("%s is dead: %s; %s", what, replica.end_reason, self._describe_restart(replica))
        # One lost rank is an alarm, the last one is the end: nothing could serve until somebody restarts it anyway.
        if self._replicas.all_lost:
            self._fail(EngineError(f"every engine is dead: {self._replicas.describe_unready()}"))

    def _describe_restart(self, replica: Replica) -> str:
        num_in_row = replica.history.restarts.num_in_row
        if replica.replacement_in_s is None:
            return f"it stays so after {num_in_row} restarts in a row (--max-restarts)"
        when = f"in {replica.replacement_in_s:g} s" if replica.replacement_in_s else "now"
        return f"starting it again {when} (restart {num_in_row} of {self._config.max_restarts} in a row)"

    def _fail(self, error: ShoalError) -> None:
        if not self._is_stopping and not self.failure.done():
            self.failure.set_result(error)


def print_banner(url: str, model: str, num_ranks: int, console: Console | None = None) -> None:
    """Print the ready banner to standard output, with plain lines that can be copied."""
    console = console or Console()
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    console.print(f"\n[bold green]Shoal is ready[/]: {model} on {ranks}\n", highlight=False)
    for name, value in (
        ("API", f"{url}/v1"),
        ("ranks", f"{url}/v1/cluster, or: shoal status --url {url}"),
        ("metrics", f"{url}/metrics"),
        ("stop", f"Ctrl-C, or: kill {os.getpid()}"),
    ):
        console.print(f"  [cyan]{name:8}[/] {value}", highlight=False, soft_wrap=True)
    console.print("\n  Try it:\n", highlight=False)
    console.print(_example(url, model), highlight=False, markup=False, soft_wrap=True)
    console.file.flush()


def _example(url: str, model: str) -> str:
    question = '[{"role": "user", "content": "Why do fish swim in schools?"}]'
    body = f'{{"model": "{model}", "messages": {question}, "temperature": 0, "stream": true}}'
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body}'\n"
