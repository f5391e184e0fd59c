"""The scale service: the calls about scaling and events that API processes may make on the control channel."""

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
from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.operations import describe_operation
from orchestrator.scaling.plan import ScaleRefusedError, ScaleRequest
from orchestrator.scaling.scaler import Scaler

Operation = TypeVar("Operation")


class ScaleService:
    """Serves calls with what the scaler and the events know, as plain data. executor: what hosts the engines."""

    def __init__(self, scaler: Scaler, engines: EngineGroup, executor: str) -> None:
        self._scaler = scaler
        self._engines = engines
        self._executor = executor

    def handlers(self) -> dict[type, Handler]:
        """Return the handler of each kind of call."""
        return {
            Scale: _refusing(self._scale),
            ListScales: _refusing(self._list),
            GetScale: _refusing(self._get),
            CancelScale: _refusing(self._cancel),
            GetCapacity: _refusing(self._capacity),
            WaitEvents: _refusing(self._events),
        }

    async def _scale(self, call: Scale) -> dict[str, Any]:
        request = ScaleRequest(size=call.size, remove=tuple(call.remove), drain_timeout_s=call.drain_timeout_s)
        return _describe(await self._scaler.begin(request, call.key))

    async def _list(self, _: ListScales) -> list[dict[str, Any]]:
        return [_describe(operation) for operation in self._scaler.operations.all()]

    async def _get(self, call: GetScale) -> dict[str, Any]:
        return _describe(self._scaler.operations.get(call.operation_id))

    async def _cancel(self, call: CancelScale) -> dict[str, Any]:
        operation = self._scaler.operations.get(call.operation_id)
        operation.cancel()
        return _describe(operation)

    async def _capacity(self, _: GetCapacity) -> dict[str, Any]:
        num_ranks = sum(1 for _ in self._engines.replicas)
        capacity = self._scaler.capacity()
        limits = self._scaler.operations.limits
        # The limit of the options, and the room on the host, where that is known.
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

    async def _events(self, call: WaitEvents) -> dict[str, Any]:
        log = self._engines.events
        after = log.last_number if call.after is None else call.after
        # Without a number the caller asks where to begin, which needs no waiting.
        events = await log.wait_after(after, call.wait_s) if call.after is not None else []
        return {"last": log.last_number, "events": [event.to_dict() for event in events]}


def _refusing(handle: Callable[[Operation], Awaitable[Any]]) -> Handler:
    """Let a refusal of scaling travel as one of the control channel, with its code and field."""

    @wraps(handle)
    async def serve(operation: Operation) -> Any:
        try:
            return await handle(operation)
        except ScaleRefusedError as error:
            fault = Fault(str(error), is_callers=True, subject=error.field, code=error.kind.value)
            raise ControlRefusedError(fault) from error

    return serve


def _describe(operation: ScaleOperation) -> dict[str, Any]:
    return describe_operation(operation, asyncio.get_running_loop().time())
