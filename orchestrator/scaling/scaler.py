"""The scaler: runs one scale operation at a time, observes the deployment for it and carries out its actions."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from client.tasks import log_failure
from engine.wire.ids import EngineId
from orchestrator.launch.host import Capacity, EngineHost
from orchestrator.ranks.engine_group import EngineGroup
from orchestrator.ranks.events import EventKind
from orchestrator.scaling.observed_state import Action, ActionKind, Placement, PlacementState, observe
from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.operations import ScaleOperations, describe_operation
from orchestrator.scaling.plan import RefusalKind, ScalePlan, ScaleRefusedError, ScaleRequest
from orchestrator.scaling.steps import Phase

_LOG = logging.getLogger(__name__)

_OBSERVE_INTERVAL_S = 0.02
_AFTER_FAULT_S = 1.0
_FREE_S = 3.0  # resources that were just given back take a moment to be counted as free
_FREE_PAUSE_S = 0.1

Reach = Callable[[], Awaitable[set[EngineId]]]
"""Asks which engines every API process that answers can send requests to."""


class Scaler:
    """Owns the task of the operation that runs; there is no task while none does.

    While one runs the deployment is observed fifty times a second: its state comes from reports, host and API processes
    alike, and an observation costs microseconds. operations: the register, which anybody may read.
    """

    def __init__(
        self,
        engines: EngineGroup,
        host: EngineHost,
        operations: ScaleOperations,
        reach: Reach,
        on_left: Callable[[int], None],
    ) -> None:
        """on_left: called with a rank before its replica is removed."""
        self.operations = operations
        self._engines = engines
        self._host = host
        self._reach = reach
        self._on_left = on_left
        self._reached: set[EngineId] = set()
        self._placement_groups = PlacementGroups(host)
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        actions = engines.actions
        self._handlers: Mapping[ActionKind, Callable[[int], None]] = {
            ActionKind.RESERVE: self._placement_groups.reserve,
            ActionKind.SPAWN: actions.add,
            ActionKind.ADMIT: actions.keep,
            ActionKind.RESTORE: actions.keep,
            ActionKind.CORDON: actions.cordon,
            ActionKind.MIGRATE: actions.migrate,
            ActionKind.LEAVE: actions.leave,
            ActionKind.STOP: actions.dismiss,
            ActionKind.KILL: actions.kill,
            ActionKind.RELEASE: partial(self._placement_groups.release, then=self._remove_replica),
        }

    def capacity(self) -> Capacity:
        """Return how many more ranks there is room for."""
        return self._host.capacity()

    async def begin(self, request: ScaleRequest, key: str | None) -> ScaleOperation:
        """Begin an operation, or return the one that this key has begun.

        Raises:
            ScaleRefusedError: another one runs, the request is invalid, there is no room for it, or the deployment is
                not serving. Nothing has been started then.
        """
        known = self.operations.repeated(request, key)
        if known is not None:
            return known
        plan = self._plan(request)
        if plan.joining:
            await self._ensure_room(plan)
            # Another caller may have begun an operation meanwhile, with this key or another.
            known = self.operations.repeated(request, key)
            plan = self._plan(request) if known is None else plan
        return known or self._begin(request, key, plan)

    async def stop(self, _force_stop: "asyncio.Future[Any]") -> list[str]:
        """Abandon the operation that runs: the deployment ends, and its parts end what the operation has started."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._placement_groups.aclose()
        return []

    def _plan(self, request: ScaleRequest) -> ScalePlan:
        if self._is_stopping or not self._engines.replicas.replacements:
            doing = "stopping" if self._is_stopping else "starting"
            raise ScaleRefusedError(RefusalKind.NOT_NOW, f"the deployment is {doing}")
        ranks = {replica.engine_id.rank: not replica.is_lost for replica in self._engines.replicas}
        return self.operations.plan(request, ranks)

    async def _ensure_room(self, plan: ScalePlan) -> None:
        deadline = _now() + _FREE_S
        num_new = len(plan.joining)
        while (capacity := self._host.capacity()).num_free is not None and capacity.num_free < num_new:
            if _now() >= deadline:
                message = f"{num_new} more ranks do not fit, {capacity.num_free} would: {capacity.text}"
                raise ScaleRefusedError(RefusalKind.NO_CAPACITY, message, "size")
            await asyncio.sleep(_FREE_PAUSE_S)

    def _begin(self, request: ScaleRequest, key: str | None, plan: ScalePlan) -> ScaleOperation:
        operation = self.operations.begin(request, key, plan, _now(), time.time())
        self._note(operation)
        if not operation.is_over:
            # What an earlier operation reached says nothing of the new ranks of this one.
            self._reached = set()
            self._task = asyncio.create_task(self._run(operation), name=f"operation {operation.id}")
        return operation

    async def _run(self, operation: ScaleOperation) -> None:
        # The stage of a lockstep group is in the reports of all its engines, also of those that have long loaded.
        self._engines.watch_loads(wanted=True)
        while not operation.is_over:
            try:
                await self._turn(operation)
            except Exception as error:  # noqa: BLE001 - an operation that never ends would block every later one
                _LOG.exception("operation %s failed in a step of its own", operation.id)
                operation.fail(f"internal error: {error!r}")
                await asyncio.sleep(_AFTER_FAULT_S)
        self._placement_groups.forget()
        self._engines.watch_loads(wanted=False)

    async def _turn(self, operation: ScaleOperation) -> None:
        # Asked only where it decides: it takes a call to every API process.
        if operation.phase is Phase.HANDSHAKE:
            self._reached = await self._reach()
        num_phases = len(operation.history)
        observed = observe(
            operation.plan,
            self._engines.replicas,
            self._engines.group_state,
            self._placement_groups.placements,
            self._reached,
            is_lockstep=self.operations.is_lockstep,
        )
        for action in operation.advance(observed, _now()):
            self._carry_out(action)
        if len(operation.history) != num_phases:
            self._note(operation)
        if not operation.is_over:
            await asyncio.sleep(_OBSERVE_INTERVAL_S)

    def _carry_out(self, action: Action) -> None:
        _LOG.debug("%s rank %d", action.kind, action.rank)
        self._handlers[action.kind](action.rank)

    def _remove_replica(self, rank: int) -> None:
        self._on_left(rank)
        self._engines.actions.remove(rank)

    def _note(self, operation: ScaleOperation) -> None:
        _LOG.info(
            "operation %s: %s%s", operation.id, operation.phase, f": {operation.error}" if operation.error else ""
        )
        self._engines.events.add(EventKind.SCALE, operation=describe_operation(operation, _now()))


class PlacementGroups:
    """The placement groups that one operation asked for, and the tasks that ask the host for them.

    placements: by rank; a rank that is not in there keeps the placement group that it has. Written here alone.
    """

    def __init__(self, host: EngineHost) -> None:
        self.placements: dict[int, Placement] = {}
        self._host = host
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def reserve(self, rank: int) -> None:
        """Ask for a placement group."""
        self.placements[rank] = Placement(PlacementState.ASKED)
        self._begin(rank, self._reserve)

    def release(self, rank: int, then: Callable[[int], None]) -> None:
        """Give a placement group up, also one that is still asked for. then: called once that is done."""
        if rank in self._tasks:
            self._tasks[rank].cancel()
        self._begin(rank, partial(self._release, then=then))

    def forget(self) -> None:
        """Let every placement group belong to the deployment: the operation is over."""
        self.placements.clear()

    async def aclose(self) -> None:
        """Stop asking; what is held is the host's to give up."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, rank: int, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        # One after the other for each rank: a release that overtook its reservation would leave a group behind.
        before = self._tasks.get(rank)

        async def run() -> None:
            if before is not None:
                await asyncio.wait([before])
            await work(rank)

        task = asyncio.create_task(run(), name=f"placement group of rank {rank}")
        self._tasks[rank] = task
        task.add_done_callback(log_failure)
        task.add_done_callback(lambda done: self._tasks.pop(rank) if self._tasks.get(rank) is done else None)

    async def _reserve(self, rank: int) -> None:
        try:
            await self._host.reserve(rank)
        except Exception as error:  # noqa: BLE001 - whatever a host raises, it is the reason why there is none
            self.placements[rank] = Placement(PlacementState.REFUSED, str(error) or repr(error))
        else:
            self.placements[rank] = Placement(PlacementState.HELD)

    async def _release(self, rank: int, then: Callable[[int], None]) -> None:
        try:
            await self._host.release(rank)
        except Exception:  # noqa: BLE001 - what a host cannot give up it ends with the deployment
            _LOG.exception("the placement group of rank %d could not be given up", rank)
        # Also after a failure: a rank that stayed half removed would block every later operation.
        then(rank)
        self.placements.pop(rank, None)


def _now() -> float:
    return asyncio.get_running_loop().time()
