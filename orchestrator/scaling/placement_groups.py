"""Placement groups of ranks that come and go, and the tasks that ask the host for them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from client.tasks import log_failure
from orchestrator.launch.host import EngineHost
from orchestrator.scaling.observed_state import PlacementState

_LOG = logging.getLogger(__name__)


class PlacementGroups:
    """What an operation knows of the places it asked for. Ranks that are not in here keep those they have."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._placement_groups: dict[int, PlacementState] = {}
        self._reasons: dict[int, str] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def of(self, rank: int, *, has_replica: bool) -> PlacementState:
        """Return whether the host keeps a place for a rank; one that has a replica has a place."""
        return self._placement_groups.get(rank, PlacementState.HELD if has_replica else PlacementState.NONE)

    def reason(self, rank: int) -> str:
        """Return why a place was refused."""
        return self._reasons.get(rank, "")

    def reserve(self, rank: int) -> None:
        """Ask for a place."""
        self._placement_groups[rank] = PlacementState.ASKED
        self._begin(rank, self._reserve)

    def release(self, rank: int, then: Callable[[int], None]) -> None:
        """Give a place up, also one that is still asked for. then: called once that is done."""

        async def give_up(rank: int) -> None:
            try:
                await self._host.release(rank)
            except Exception:  # noqa: BLE001 - what a host cannot give up it ends with the deployment
                _LOG.exception("the place of rank %d could not be given up", rank)
            then(rank)
            self._placement_groups.pop(rank, None)

        asking = self._tasks.get(rank)
        if asking is not None:
            asking.cancel()
        self._begin(rank, give_up)

    def forget(self) -> None:
        """Let every place belong to the deployment: the operation is over."""
        self._placement_groups.clear()
        self._reasons.clear()

    async def aclose(self) -> None:
        """Stop asking; what is held is the host's to give up."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, rank: int, act: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Do one thing for a rank, after what is being done for it."""
        before = self._tasks.get(rank)

        async def run() -> None:
            if before is not None:
                await asyncio.wait([before])
            await act(rank)

        task = asyncio.create_task(run(), name=f"place of rank {rank}")
        self._tasks[rank] = task
        task.add_done_callback(log_failure)
        task.add_done_callback(lambda done: self._tasks.pop(rank) if self._tasks.get(rank) is done else None)

    async def _reserve(self, rank: int) -> None:
        try:
            await self._host.reserve(rank)
        except Exception as error:  # noqa: BLE001 - whatever a host raises, there is no place, and it says why
            self._placement_groups[rank], self._reasons[rank] = PlacementState.REFUSED, str(error) or repr(error)
        else:
            self._placement_groups[rank] = PlacementState.HELD
