"""The ranks of a deployment as one thing: started together, watched, dismissed together."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.config import EngineSpec
from engine.wire.ids import EngineId
from engine.wire.messages import EngineReport
from orchestrator.coordinator_keeper import BoundEndpoints
from orchestrator.group_line import GroupLine
from orchestrator.launch.host import EngineExit, EngineHost
from orchestrator.launch.waits import wait_all
from orchestrator.progress import StartProgress
from orchestrator.seats import SeatStatus, SeatTable

_LEAVE_S = 5.0  # dismissed engines get this long to end by themselves
_KILLED_S = 5.0  # a killed process is gone by then, or its host is


class EngineGroup:
    """Holds the seats, the host that runs their engines and the line on which they are published.

    seats: written only here, on the event loop. on_death: called once per engine whose process ended, with its seat,
    whatever the reason; not called any more once ``stop`` has begun.
    """

    def __init__(
        self, num_ranks: int, host: EngineHost, progress: StartProgress, on_death: Callable[[SeatStatus], None]
    ) -> None:
        self.seats = SeatTable([EngineId(rank, 1) for rank in range(num_ranks)])
        self._host = host
        self._progress = progress
        self._on_death = on_death
        self._exits: dict[EngineId, asyncio.Future[EngineExit]] = {}
        self._all_ready = asyncio.Event()
        self._is_stopping = False
        self._line: GroupLine | None = None

    def connect(self, endpoints: BoundEndpoints) -> None:
        """Open the line to the coordinator and publish the seats from now on."""
        self._line = GroupLine(
            endpoints.report_endpoint, endpoints.state_endpoint, self.seats.to_report, self._on_report
        )
        self._line.publish()

    async def start(self, make_spec: Callable[[EngineId], EngineSpec]) -> None:
        """Order one engine per seat."""
        for seat in self.seats:
            handle = await self._host.start(make_spec(seat.engine_id))
            self._exits[seat.engine_id] = handle.exited
            handle.exited.add_done_callback(partial(self._on_exit, seat.engine_id))

    async def wait_ready(self) -> None:
        """Wait until every engine has loaded, then stop listening to their loads."""
        await self._all_ready.wait()
        assert self._line is not None
        self._line.stop_listening()

    async def stop(self, hurry: "asyncio.Future[Any]") -> list[str]:
        """Dismiss the engines that serve, kill those that do not leave, and return one line for each of these.

        hurry: once it is done, nobody is waited for any more.
        """
        self._is_stopping = True
        self.seats.dismiss()
        if self._line is not None:
            self._line.publish()
        # An engine that has not loaded holds nothing of anybody's: no reason to wait for it.
        loaded = [exited for engine_id, exited in self._exits.items() if self.seats.of(engine_id).is_ready]
        await wait_all(loaded, _LEAVE_S, hurry)
        remarks = await self._kill_rest()
        if self._line is not None:
            self._line.close()
        return remarks

    async def _kill_rest(self) -> list[str]:
        rest = [engine_id for engine_id, exited in self._exits.items() if not exited.done()]
        for engine_id in rest:
            self._host.kill(engine_id)
        await wait_all([self._exits[engine_id] for engine_id in rest], _KILLED_S)
        return [
            f"rank {engine_id.rank} {'was' if self._exits[engine_id].done() else 'could not be'} killed"
            for engine_id in rest
        ]

    def _on_report(self, report: EngineReport) -> None:
        was_ready = {seat.engine_id for seat in self.seats if seat.is_ready}
        seat = self.seats.on_report(report)
        if seat is None:
            return
        self._progress.show(seat)
        if seat.is_ready and seat.engine_id not in was_ready and self._line is not None:
            self._line.publish()
        if self.seats.all_ready:
            self._all_ready.set()

    def _on_exit(self, engine_id: EngineId, exited: "asyncio.Future[EngineExit]") -> None:
        seat = self.seats.on_exit(engine_id, exited.result())
        if self._is_stopping:
            return
        if self._line is not None:
            self._line.publish()
        self._on_death(seat)
