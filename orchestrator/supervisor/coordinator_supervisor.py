"""Keeps one coordinator process alive: a successor gets a higher generation and the same endpoints."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from engine.wire.errors import ShoalError
from lb.coordinator.config import CoordinatorEndpoints, CoordinatorSpec
from orchestrator.processes.child_process import LineSink
from orchestrator.processes.process_supervisor import ProcessSpec, ProcessSupervisor
from orchestrator.processes.restarts import RestartRule

COORDINATOR_MODULE = "lb.coordinator"

# One that served for 3 s has not died of its start. Loads go stale while it is away, so the pauses are short.
RULE = RestartRule(max_in_row=5, settled_s=3.0, first_pause_s=0.4)

_STOP_S = 2.0


class CoordinatorSupervisor:
    """Starts the coordinator and restarts it until ``stop``.

    endpoints: fixed by the first one that came up; connected sockets find every successor there.
    """

    def __init__(
        self,
        spec: CoordinatorSpec,
        on_line: LineSink,
        on_give_up: Callable[[ShoalError], None],
        rule: RestartRule = RULE,
        start_s: float | None = None,
    ) -> None:
        """Start nothing yet. start_s: how long a successor may take until it listens; None: no limit."""
        self._spec = spec
        process = ProcessSpec(
            name="the coordinator",
            module=COORDINATOR_MODULE,
            make_spec=lambda life: msgspec.structs.replace(self._spec, generation=life),
            life_name=lambda life: f"generation {life}",
            rule=rule,
            stop_s=_STOP_S,
            start_s=start_s,
        )
        self._supervisor = ProcessSupervisor(process, on_line, lambda _: None, on_give_up)

    @property
    def pid(self) -> int | None:
        """Return the process id of the coordinator that lives now."""
        return self._supervisor.pid

    async def start(self) -> CoordinatorEndpoints:
        """Start the first coordinator and wait until it listens.

        Raises:
            StartupError: it ended before; with its last line.
        """
        endpoints = msgspec.json.decode(await self._supervisor.start(), type=CoordinatorEndpoints)
        self._spec = msgspec.structs.replace(
            self._spec, report_endpoint=endpoints.report_endpoint, state_endpoint=endpoints.state_endpoint
        )
        return endpoints

    async def stop(self, force_stop: "asyncio.Future[Any]") -> list[str]:
        """End the coordinator for good; return a line when it had to be killed."""
        return await self._supervisor.stop(force_stop)
