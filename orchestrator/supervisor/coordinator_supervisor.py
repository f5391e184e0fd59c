"""The supervisor of the coordinator process: a successor gets a higher generation and the same endpoints."""

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

# One that served for 3 s did not end because of its start. Loads go stale while it is away, so the pauses are short.
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
            make_spec=lambda incarnation: msgspec.structs.replace(self._spec, generation=incarnation),
            incarnation_name=lambda incarnation: f"generation {incarnation}",
            rule=rule,
            stop_s=_STOP_S,
            start_s=start_s,
        )
        self._supervisor = ProcessSupervisor(process, on_line, lambda _: None, on_give_up)

    @property
    def pid(self) -> int | None:
        """Return the process id of the coordinator that runs now."""
        return self._supervisor.pid

    async def start(self) -> CoordinatorEndpoints:
        """Start the first coordinator and wait until it listens.

        Raises:
            StartupError: it ended before; with its last line.
        """
        endpoints = msgspec.json.decode(await self._supervisor.start(), type=CoordinatorEndpoints)
        # The endpoints that were really bound: a successor must take the same ports, which all others are connected to.
        self._spec = msgspec.structs.replace(
            self._spec, report_endpoint=endpoints.report_endpoint, state_endpoint=endpoints.state_endpoint
        )
        return endpoints

    async def stop(self, force_stop: "asyncio.Future[Any]") -> list[str]:
        """End the coordinator for good; return a line when it had to be killed."""
        return await self._supervisor.stop(force_stop)
