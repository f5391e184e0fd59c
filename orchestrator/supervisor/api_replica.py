"""One replica of an API process: its lives follow each other, each as a client of its own."""

import asyncio
from collections.abc import Callable
from typing import Any

from engine.wire.errors import ShoalError
from engine.wire.ids import ClientId
from orchestrator.api.server.config import ApiSpec
from orchestrator.processes.child_process import LineSink
from orchestrator.processes.process_supervisor import ProcessSpec, ProcessSupervisor
from orchestrator.processes.restarts import RestartRule

API_MODULE = "orchestrator.api"

_GRACE_S = 3.0  # on top of the shutdown timeout, for the last messages of aborted streams


class ApiReplica:
    """Starts the API process of one client index and restarts it under the next incarnation until ``stop``.

    The listening socket is the supervisor's and outlives every process: callers that come while none lives wait in its
    queue. name: for people. on_gone: called with the client as soon as its process has ended, so that the engines free
    its requests.
    """

    def __init__(
        self,
        index: int,
        make_spec: Callable[[ClientId], ApiSpec],
        rule: RestartRule,
        on_line: LineSink,
        on_gone: Callable[[ClientId], None],
        on_give_up: Callable[[ShoalError], None],
    ) -> None:
        self.name = f"the API process {index}"
        spec = make_spec(ClientId(index, 1))
        process = ProcessSpec(
            name=self.name,
            module=API_MODULE,
            make_spec=lambda life: make_spec(ClientId(index, life)),
            life_name=lambda life: f"client {ClientId(index, life)}",
            rule=rule,
            stop_s=spec.shutdown_timeout_s + _GRACE_S,
            start_s=spec.start_timeout_s,
            pass_fds=(spec.listen_fd, *(spec.stats.fds if spec.stats is not None else ())),
        )
        self._supervisor = ProcessSupervisor(process, on_line, lambda life: on_gone(ClientId(index, life)), on_give_up)

    @property
    def pid(self) -> int | None:
        """Return the process id of the life that goes on now."""
        return self._supervisor.pid

    async def start(self) -> None:
        """Start the first process and wait until it listens; engines it may still wait for.

        Raises:
            StartupError: it ended before; with its last line.
        """
        await self._supervisor.start()

    async def stop(self, force_stop: "asyncio.Future[Any]") -> list[str]:
        """Let the process drain and end; return a line when it had to be killed."""
        return await self._supervisor.stop(force_stop)
