"""Keeps one coordinator process alive: a successor gets a higher generation and the same endpoints."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from engine.wire.errors import ShoalError, StartupError
from engine.wire.sockets import advertised
from lb.config import CoordinatorSpec
from orchestrator.launch.host import EngineExit, LineSink
from orchestrator.launch.subprocess import ChildProcess, start_child

_LOG = logging.getLogger(__name__)

COORDINATOR_MODULE = "lb.coordinator"

_SETTLED_S = 10.0  # a coordinator that lived this long has not died of its start
_MAX_QUICK_DEATHS = 5
_FIRST_PAUSE_S = 0.1
_STOP_S = 2.0


class BoundEndpoints(msgspec.Struct, frozen=True):
    """The ready line of a coordinator: where it really listens."""

    report_endpoint: str
    state_endpoint: str

    def under(self, host: str | None) -> "BoundEndpoints":
        """Return both as others reach them: under ``host``, or as they are with None."""
        return BoundEndpoints(advertised(self.report_endpoint, host), advertised(self.state_endpoint, host))


class CoordinatorKeeper:
    """Starts the coordinator and restarts it until ``stop``.

    endpoints: fixed by the first one that came up; connected sockets find every successor there.
    """

    def __init__(self, spec: CoordinatorSpec, on_line: LineSink, on_give_up: Callable[[ShoalError], None]) -> None:
        self._spec = spec
        self._on_line = on_line
        self._on_give_up = on_give_up
        self._child: ChildProcess | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the coordinator that lives now."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> BoundEndpoints:
        """Start the first coordinator and wait until it listens.

        Raises:
            StartupError: it ended before; with its last line.
        """
        child, endpoints = await self._start_one()
        self._spec = msgspec.structs.replace(
            self._spec, report_endpoint=endpoints.report_endpoint, state_endpoint=endpoints.state_endpoint
        )
        self._keeping = asyncio.create_task(self._keep(child), name="keep the coordinator")
        return endpoints

    async def stop(self, hurry: "asyncio.Future[Any]") -> list[str]:
        """End the coordinator for good; return a line when it had to be killed."""
        if self._keeping is not None:
            self._keeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeping
        child, self._child = self._child, None
        obeyed = child is None or await child.stop(_STOP_S, hurry)
        return [] if obeyed else ["the coordinator did not stop and was killed"]

    async def _start_one(self) -> tuple[ChildProcess, BoundEndpoints]:
        self._child = await start_child(COORDINATOR_MODULE, self._spec, self._on_line)
        line = await self._child.ready_line()
        return self._child, msgspec.json.decode(line, type=BoundEndpoints)

    async def _keep(self, child: ChildProcess) -> None:
        loop = asyncio.get_running_loop()
        num_quick_deaths = 0
        while True:
            started_at = loop.time()
            end = await asyncio.shield(child.exited)
            num_quick_deaths = 0 if loop.time() - started_at > _SETTLED_S else num_quick_deaths + 1
            if num_quick_deaths > _MAX_QUICK_DEATHS:
                self._on_give_up(StartupError(f"the coordinator died {num_quick_deaths} times in a row: {end.reason}"))
                return
            child = await self._replace(end, num_quick_deaths)

    async def _replace(self, end: EngineExit, num_quick_deaths: int) -> ChildProcess:
        self._spec = msgspec.structs.replace(self._spec, generation=self._spec.generation + 1)
        _LOG.warning("the coordinator is gone (%s); starting generation %d", end.reason, self._spec.generation)
        await asyncio.sleep(_FIRST_PAUSE_S * 2**num_quick_deaths if num_quick_deaths > 1 else 0)
        with suppress(StartupError):  # its end is seen by the next turn of the loop
            await self._start_one()
        assert self._child is not None
        return self._child
