"""Carries scale operations out: looks at the deployment, lets the operation decide, does what it orders."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from engine.wire.ids import EngineId
from orchestrator.engine_group import EngineGroup
from orchestrator.events import EventKind
from orchestrator.launch.host import Capacity, EngineHost
from orchestrator.scaling.describe import describe_operation
from orchestrator.scaling.errors import RefusalKind, ScaleRefusedError
from orchestrator.scaling.facts import Order, Verb
from orchestrator.scaling.look import look
from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.operations import ScaleOperations
from orchestrator.scaling.places import Places
from orchestrator.scaling.plan import ScalePlan, ScaleWish
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
        """on_left: called with a rank before its seat is removed."""
        self.operations = operations
        self._engines = engines
        self._host = host
        self._reach = reach
        self._on_left = on_left
        self._reached: set[EngineId] = set()
        self._places = Places(host)
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        seat_orders: dict[Verb, Callable[[int], None]] = {
            Verb.SPAWN: engines.open_seat,
            Verb.ADMIT: engines.keep_seat,
            Verb.RESTORE: engines.keep_seat,
            Verb.CORDON: engines.cordon,
            Verb.MOVE: engines.vacate,
            Verb.LEAVE: engines.leave,
            Verb.STOP: engines.dismiss,
            Verb.KILL: engines.kill,
        }
        self._doers = seat_orders | {
            Verb.RESERVE: self._places.reserve,
            Verb.RELEASE: partial(self._places.release, then=self._close_seat),
        }

    def capacity(self) -> Capacity:
        """Say how many more ranks there is room for."""
        return self._host.capacity()

    async def begin(self, wish: ScaleWish, key: str | None) -> ScaleOperation:
        """Begin an operation, or return the one that this key has begun.

        Raises:
            ScaleRefusedError: another one runs, it makes no sense, there is no room for it, or the deployment is not
                serving. Nothing has been started then.
        """
        known = self.operations.repeated(wish, key)
        if known is not None:
            return known
        plan = self._plan(wish)
        if plan.joining:
            await self._ensure_room(plan)
            known = self.operations.repeated(wish, key)  # somebody may have begun meanwhile, with this key or another
            plan = self._plan(wish) if known is None else plan
        return known or self._begin(wish, key, plan)

    async def stop(self, _hurry: "asyncio.Future[Any]") -> list[str]:
        """Let go of the operation that runs: the deployment ends, and its parts see to what is there."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._places.aclose()
        return []

    def _plan(self, wish: ScaleWish) -> ScalePlan:
        if self._is_stopping or not self._engines.seats.refills:
            doing = "stopping" if self._is_stopping else "starting"
            raise ScaleRefusedError(RefusalKind.NOT_NOW, f"the deployment is {doing}")
        ranks = {seat.engine_id.rank: not seat.is_lost for seat in self._engines.seats}
        return self.operations.plan(wish, ranks)

    async def _ensure_room(self, plan: ScalePlan) -> None:
        deadline = asyncio.get_running_loop().time() + _FREE_S
        num_new = len(plan.joining)
        while (capacity := self._host.capacity()).num_free is not None and capacity.num_free < num_new:
            if asyncio.get_running_loop().time() >= deadline:
                message = f"{num_new} more ranks do not fit, {capacity.num_free} would: {capacity.text}"
                raise ScaleRefusedError(RefusalKind.NO_CAPACITY, message, "size")
            await asyncio.sleep(_FREE_PAUSE_S)

    def _begin(self, wish: ScaleWish, key: str | None, plan: ScalePlan) -> ScaleOperation:
        operation = self.operations.begin(wish, key, plan)
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
        self._places.forget()
        self._engines.watch_loads(wanted=False)

    async def _turn(self, operation: ScaleOperation) -> None:
        if operation.phase is Phase.HANDSHAKE:
            self._reached = await self._reach()
        before = len(operation.history)
        facts = look(operation.plan, self._engines, self._places, self._reached, self.operations.is_lockstep)
        for order in operation.advance(facts, asyncio.get_running_loop().time()):
            self._carry_out(order)
        if len(operation.history) != before:
            self._note(operation)
        if not operation.is_over:
            await asyncio.sleep(_PAUSE_S)

    def _carry_out(self, order: Order) -> None:
        _LOG.debug("%s rank %d", order.verb, order.rank)
        self._doers[order.verb](order.rank)

    def _close_seat(self, rank: int) -> None:
        self._on_left(rank)
        self._engines.close_seat(rank)

    def _note(self, operation: ScaleOperation) -> None:
        _LOG.info(
            "operation %s: %s%s", operation.id, operation.phase, f": {operation.error}" if operation.error else ""
        )
        facts = describe_operation(operation, asyncio.get_running_loop().time())
        self._engines.events.add(EventKind.SCALE, operation=facts)
