"""The API processes of a deployment as one thing: started together, each restarted by itself, stopped together."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.wire.errors import ShoalError
from engine.wire.ids import ClientId
from metrics.memory import StatsMemory
from orchestrator.api.server.config import ApiSpec
from orchestrator.processes.child_process import LineSink
from orchestrator.processes.restarts import RestartRule
from orchestrator.supervisor.api_replica import ApiReplica
from orchestrator.supervisor.readiness import wait_reachable

_LOG = logging.getLogger(__name__)

MakeSpec = Callable[[ClientId, StatsMemory], ApiSpec]


class ApiGroup:
    """Holds a replica per API process, and the memory in which they count.

    on_gone: called with the client of every process that ended; what it showed is off the shared status by then.
    on_give_up: called once no process is left and none will come; before that, the others serve on without one.
    """

    def __init__(
        self,
        num_processes: int,
        make_spec: MakeSpec,
        rule: RestartRule,
        on_line: LineSink,
        on_gone: Callable[[ClientId], None],
        on_give_up: Callable[[ShoalError], None],
    ) -> None:
        self._memory = StatsMemory.make(num_processes)
        self._rows = self._memory.rows()
        self._on_gone = on_gone
        self._on_give_up = on_give_up
        self._lost: set[int] = set()
        self._replicas = [
            ApiReplica(
                index,
                lambda client_id: make_spec(client_id, self._memory),
                rule,
                on_line,
                self._on_end,
                partial(self._on_lost, index),
            )
            for index in range(num_processes)
        ]

    async def start(self) -> None:
        """Start every process and wait until each listens; engines they may still wait for.

        Raises:
            StartupError: one ended before; with its last line.
        """
        try:
            async with asyncio.TaskGroup() as starts:
                for replica in self._replicas:
                    starts.create_task(replica.start(), name=f"start {replica.name}")
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def wait_reachable(self, num_ranks: int) -> None:
        """Wait until every process says that it reaches that many ranks."""
        await wait_reachable(self._rows, num_ranks)

    async def stop(self, force_stop: "asyncio.Future[Any]") -> list[str]:
        """Let all drain and end; return a line for each that had to be killed."""
        leftovers = await asyncio.gather(*(replica.stop(force_stop) for replica in self._replicas))
        self._memory.close()
        return [leftover for of_one in leftovers for leftover in of_one]

    def _on_end(self, client_id: ClientId) -> None:
        self._rows[client_id.index].clear()
        self._on_gone(client_id)

    def _on_lost(self, index: int, error: ShoalError) -> None:
        self._lost.add(index)
        if len(self._lost) == len(self._replicas):
            self._on_give_up(error)
        else:
            _LOG.error("%s; the others serve on", error)
