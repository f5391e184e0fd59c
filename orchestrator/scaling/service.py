"""What API processes may ask about scaling, on the control channel."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import wraps
from typing import Any, TypeVar

from orchestrator.control.calls import Handler
from orchestrator.control.errors import ControlRefusedError
from orchestrator.control.messages import (
    CancelScale,
    Fault,
    GetCapacity,
    GetScale,
    ListScales,
    Scale,
    WaitEvents,
)
from orchestrator.ranks.engine_group import EngineGroup
from orchestrator.scaling.describe import describe_operation
from orchestrator.scaling.errors import ScaleRefusedError
from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.plan import ScaleRequest
from orchestrator.scaling.scaler import Scaler

Asked = TypeVar("Asked")


class ScaleService:
    """Serves on behalf of the scaler, with plain data."""

    def __init__(self, scaler: Scaler, engines: EngineGroup, executor: str) -> None:
        """Serve. executor: what hosts the engines, for people."""
        self._scaler = scaler
        self._engines = engines
        self._executor = executor

    def handlers(self) -> dict[type, Handler]:
        """Return what is done for each kind of call."""
        return {
            Scale: refusing(self._scale),
            ListScales: refusing(self._list),
            GetScale: refusing(self._get),
            CancelScale: refusing(self._cancel),
            GetCapacity: refusing(self._capacity),
            WaitEvents: refusing(self._events),
        }

    async def _scale(self, ask: Scale) -> dict[str, Any]:
        request = ScaleRequest(size=ask.size, remove=tuple(ask.remove), drain_timeout_s=ask.drain_timeout_s)
        return _describe(await self._scaler.begin(request, ask.key))

    async def _list(self, _: ListScales) -> list[dict[str, Any]]:
        return [_describe(operation) for operation in self._scaler.operations.all()]

    async def _get(self, ask: GetScale) -> dict[str, Any]:
        return _describe(self._scaler.operations.get(ask.operation_id))

    async def _cancel(self, ask: CancelScale) -> dict[str, Any]:
        operation = self._scaler.operations.get(ask.operation_id)
        operation.cancel()
        return _describe(operation)

    async def _capacity(self, _: GetCapacity) -> dict[str, Any]:
        num_ranks = sum(1 for _ in self._engines.replicas)
        capacity = self._scaler.capacity()
        limits = self._scaler.operations.limits
        room = max(0, limits.max_size - num_ranks)
        can_add = room if capacity.num_free is None else min(room, capacity.num_free)
        return {
            "executor": self._executor,
            "ranks": num_ranks,
            "can_add": can_add,
            "max_ranks": num_ranks + can_add,
            "limits": asdict(limits),
            "free": capacity.resources,
            "detail": capacity.text,
        }

    async def _events(self, ask: WaitEvents) -> dict[str, Any]:
        log = self._engines.events
        after = log.last_number if ask.after is None else ask.after
        events = await log.wait_after(after, ask.wait_s) if ask.after is not None else []
        return {"last": log.last_number, "events": [event.to_dict() for event in events]}


def refusing(act: Callable[[Asked], Awaitable[Any]]) -> Handler:
    """Let a refusal of scaling be one of the control channel."""

    @wraps(act)
    async def serve(ask: Asked) -> Any:
        try:
            return await act(ask)
        except ScaleRefusedError as error:
            fault = Fault(str(error), is_callers=True, subject=error.field, code=error.kind.value)
            raise ControlRefusedError(fault) from error

    return serve


def _describe(operation: ScaleOperation) -> dict[str, Any]:
    return describe_operation(operation, asyncio.get_running_loop().time())
