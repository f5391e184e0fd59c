"""The API processes of a deployment: started together, each restarted by itself, stopped together."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.wire.errors import ShoalError
from engine.wire.ids import ClientId
from metrics.shared_status import StatsMemory
from orchestrator.api.server.config import ApiSpec
from orchestrator.processes.child_process import LineSink
from orchestrator.processes.process_supervisor import ProcessSpec, ProcessSupervisor
from orchestrator.processes.restarts import RestartRule

_LOG = logging.getLogger(__name__)

API_MODULE = "orchestrator.api"

_GRACE_S = 3.0  # on top of the shutdown timeout, for the last messages of aborted streams
_REACHABLE_POLL_S = 0.02

MakeSpec = Callable[[ClientId, StatsMemory], ApiSpec]


class ApiGroup:
    """One supervised process per client index, and the shared memory in which they all count.

    The listening socket is the supervisor's and outlives every process: callers that come while none runs wait in its
    queue. Each restart is a client of its own, under the next incarnation.
    on_gone: called with the client of every process that ended, so that engines free its requests; what it showed is
    off the shared status by then. on_give_up: called once no process is left and none will come; before that, the
    others serve on without one.
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
        self._supervisors = [
            ProcessSupervisor(
                self._process_spec(index, make_spec, rule),
                on_line,
                partial(self._on_end, index),
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
                for index, supervisor in enumerate(self._supervisors):
                    starts.create_task(supervisor.start(), name=f"start {_name(index)}")
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def wait_reachable(self, num_ranks: int) -> None:
        """Wait until every process itself shows that it reaches that many ranks.

        Engines are ready a moment before their connections to the clients are.
        """
        while not all(row.num_ready >= num_ranks for row in self._rows):  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(_REACHABLE_POLL_S)

    async def stop(self, force_stop: "asyncio.Future[Any]") -> list[str]:
        """Let all drain and end; return a line for each that had to be killed."""
        leftovers = await asyncio.gather(*(supervisor.stop(force_stop) for supervisor in self._supervisors))
        self._memory.close()
        return [leftover for of_one in leftovers for leftover in of_one]

    def _process_spec(self, index: int, make_spec: MakeSpec, rule: RestartRule) -> ProcessSpec:
        # Time-outs and descriptors are the same for every incarnation.
        first = make_spec(ClientId(index, 1), self._memory)
        return ProcessSpec(
            name=_name(index),
            module=API_MODULE,
            make_spec=lambda incarnation: make_spec(ClientId(index, incarnation), self._memory),
            incarnation_name=lambda incarnation: f"client {ClientId(index, incarnation)}",
            rule=rule,
            stop_s=first.shutdown_timeout_s + _GRACE_S,
            start_s=first.start_timeout_s,
            pass_fds=(first.listen_fd, *self._memory.fds),
        )

    def _on_end(self, index: int, incarnation: int) -> None:
        # Its row first: a sibling that looks at the shared status must not count what is gone.
        self._rows[index].clear()
        self._on_gone(ClientId(index, incarnation))

    def _on_lost(self, index: int, error: ShoalError) -> None:
        self._lost.add(index)
        if len(self._lost) == len(self._supervisors):
            self._on_give_up(error)
        else:
            _LOG.error("%s; the others serve on", error)


def _name(index: int) -> str:
    return f"the API process {index}"
