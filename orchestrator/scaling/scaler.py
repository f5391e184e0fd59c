"""Carries scale operations out: looks at the deployment, lets the operation decide, does what it orders."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from engine.wire.ids import EngineId
from orchestrator.launch.host import Capacity, EngineHost
from orchestrator.ranks.engine_group import EngineGroup
from orchestrator.ranks.events import EventKind
from orchestrator.scaling.describe import describe_operation
from orchestrator.scaling.errors import RefusalKind, ScaleRefusedError
from orchestrator.scaling.observe import observe
from orchestrator.scaling.observed_state import Action, ActionKind
from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.operations import ScaleOperations
from orchestrator.scaling.placement_groups import PlacementGroups
from orchestrator.scaling.plan import ScalePlan, ScaleRequest
from orchestrator.scaling.steps import Phase

_LOG = logging.getLogger(__name__)

_PAUSE_S = 0.02
_AFTER_FAULT_S = 1.0
_FREE_S = 3.0  # what was just given back takes a moment to be counted as free
_FREE_PAUSE_S = 0.1

Reach = Callable[[], Awaitable[set[EngineId]]]
"""Asks which engines every API process that answers can send requests to."""


class Scaler:
    """Owns the task of the operation that runs; there is no task while none does.

    While one runs it looks fifty times a second: facts come from reports, host and API processes alike, and a look
    costs microseconds. operations: the register, which anybody may read.
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
        replica_actions: dict[ActionKind, Callable[[int], None]] = {
            ActionKind.SPAWN: engines.add_replica,
            ActionKind.ADMIT: engines.keep_replica,
            ActionKind.RESTORE: engines.keep_replica,
            ActionKind.CORDON: engines.cordon,
            ActionKind.MIGRATE: engines.vacate,
            ActionKind.LEAVE: engines.leave,
            ActionKind.STOP: engines.dismiss,
            ActionKind.KILL: engines.kill,
        }
        self._doers = replica_actions | {
            ActionKind.RESERVE: self._placement_groups.reserve,
            ActionKind.RELEASE: partial(self._placement_groups.release, then=self._close_replica),
        }

    def capacity(self) -> Capacity:
        """Say how many more ranks there is room for."""
        return self._host.capacity()

    async def begin(self, request: ScaleRequest, key: str | None) -> ScaleOperation:
        """Begin an operation, or return the one that this key has begun.

        Raises:
            ScaleRefusedError: another one runs, it makes no sense, there is no room for it, or the deployment is not
                serving. Nothing has been started then.
        """
        known = self.operations.repeated(request, key)
        if known is not None:
            return known
        plan = self._plan(request)
        if plan.joining:
            await self._ensure_room(plan)
            known = self.operations.repeated(
                request, key
            )  # somebody may have begun meanwhile, with this key or another
            plan = self._plan(request) if known is None else plan
        return known or self._begin(request, key, plan)

    async def stop(self, _force_stop: "asyncio.Future[Any]") -> list[str]:
        """Let go of the operation that runs: the deployment ends, and its parts see to what is there."""
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
        deadline = asyncio.get_running_loop().time() + _FREE_S
        num_new = len(plan.joining)
        while (capacity := self._host.capacity()).num_free is not None and capacity.num_free < num_new:
            if asyncio.get_running_loop().time() >= deadline:
                message = f"{num_new} more ranks do not fit, {capacity.num_free} would: {capacity.text}"
                raise ScaleRefusedError(RefusalKind.NO_CAPACITY, message, "size")
            await asyncio.sleep(_FREE_PAUSE_S)

    def _begin(self, request: ScaleRequest, key: str | None, plan: ScalePlan) -> ScaleOperation:
        operation = self.operations.begin(request, key, plan)
        self._note(operation)
        if not operation.is_over:
            self._reached = set()
            self._task = asyncio.create_task(self._run(operation), name=f"operation {operation.id}")
        return operation

    async def _run(self, operation: ScaleOperation) -> None:
        self._engines.watch_loads(wanted=True)  # where a group stands is told by engines that are long settled
        while not operation.is_over:
            try:
                await self._turn(operation)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not leave an operation behind that never ends
                _LOG.exception("operation %s stumbled", operation.id)
                operation.fail(f"internal error: {error!r}")
                await asyncio.sleep(_AFTER_FAULT_S)
        self._placement_groups.forget()
        self._engines.watch_loads(wanted=False)

    async def _turn(self, operation: ScaleOperation) -> None:
        if operation.phase is Phase.HANDSHAKE:
            self._reached = await self._reach()
        before = len(operation.history)
        observed = observe(
            operation.plan, self._engines, self._placement_groups, self._reached, self.operations.is_lockstep
        )
        for action in operation.advance(observed, asyncio.get_running_loop().time()):
            self._carry_out(action)
        if len(operation.history) != before:
            self._note(operation)
        if not operation.is_over:
            await asyncio.sleep(_PAUSE_S)

    def _carry_out(self, action: Action) -> None:
        _LOG.debug("%s rank %d", action.kind, action.rank)
        self._doers[action.kind](action.rank)

    def _close_replica(self, rank: int) -> None:
        self._on_left(rank)
        self._engines.remove_replica(rank)

    def _note(self, operation: ScaleOperation) -> None:
        _LOG.info(
            "operation %s: %s%s", operation.id, operation.phase, f": {operation.error}" if operation.error else ""
        )
        observed = describe_operation(operation, asyncio.get_running_loop().time())
        self._engines.events.add(EventKind.SCALE, operation=observed)
