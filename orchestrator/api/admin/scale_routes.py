"""The routes of scaling: the names and shapes that tools for vLLM know, and richer ones below ``/v1/cluster``."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from orchestrator.api.base.errors import AdminError, ApiError
from orchestrator.config.defaults import DRAIN_TIMEOUT_S, MAX_RANKS
from orchestrator.control.client import ControlClient
from orchestrator.control.errors import ControlError
from orchestrator.control.messages import (
    CancelScale,
    GetCapacity,
    GetScale,
    ListScales,
    Scale,
    ScaleCall,
    WaitEvents,
)

_CALL_S = 10.0
_POLL_S = 0.05
_BEAT_S = 10.0
_MAX_DRAIN_S = 86_400.0
MAX_FOLLOWERS = 64
"""Open event streams of one process at most: each keeps a call to the supervisor waiting."""

_ACCEPTED = 202
_FAILED = 500
_KEY = Field(None, min_length=1, max_length=256)


class ElasticBody(BaseModel):
    """The body of vLLM's route."""

    model_config = ConfigDict(extra="forbid")

    new_data_parallel_size: StrictInt = Field(gt=0)
    drain_timeout: float = Field(DRAIN_TIMEOUT_S, ge=0, le=_MAX_DRAIN_S)


class ScaleBody(BaseModel):
    """A number of ranks, ranks that shall go, or both; see ``ScaleRequest``."""

    model_config = ConfigDict(extra="forbid")

    size: StrictInt | None = Field(None, gt=0)
    remove: list[Annotated[StrictInt, Field(ge=0)]] = Field([], max_length=MAX_RANKS)
    drain_timeout: float = Field(DRAIN_TIMEOUT_S, ge=0, le=_MAX_DRAIN_S)
    idempotency_key: str | None = _KEY

    @model_validator(mode="after")
    def _asks_for_something(self) -> "ScaleBody":
        if self.size is None and not self.remove:
            raise ValueError("give size, remove or both")
        return self


class Scaling:
    """Carries scale calls to the supervisor, which alone knows of operations: any API process answers for it."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._num_followers = 0

    async def ask(self, call: ScaleCall, timeout_s: float = _CALL_S) -> Any:
        """Ask the supervisor.

        Raises:
            ControlError: it refuses, or does not answer.
        """
        return await self._control.call(call, timeout_s)

    async def scale_and_wait(self, size: int, drain_s: float) -> None:
        """Scale to a size and return when that is over. The operation goes on if the caller does not wait for it.

        Raises:
            ControlError: the supervisor refused it. ApiError: it failed or was cancelled.
        """
        operation = await self.ask(Scale(size, [], drain_s, None))
        while operation["status"] == "running":
            await asyncio.sleep(_POLL_S)
            operation = await self.ask(GetScale(operation["id"]))
        if operation["status"] != "done":
            reason = operation["error"] or "it was cancelled"
            message = f"operation {operation['id']} {operation['status']}: {reason}"
            raise AdminError(_FAILED, message, {"operation": operation}, code=f"scale_{operation['status']}")

    async def is_running(self) -> bool:
        """Tell whether an operation is running."""
        return any(operation["status"] == "running" for operation in await self.ask(ListScales()))

    async def follow(self, after: int | None) -> AsyncIterator[bytes]:
        """Yield events as server-sent events, for as long as the caller stays. after: begin behind this number."""
        self._num_followers += 1
        try:
            number = (await self.ask(WaitEvents(None, 0.0)))["last"] if after is None else after
            yield b": events of this deployment\n\n"
            while True:
                news = await self.ask(WaitEvents(number, _BEAT_S), _BEAT_S + _CALL_S)
                number = min(number, news["last"])  # the caller's may be of an earlier deployment
                for event in news["events"]:
                    number = event["number"]
                    yield f"id: {number}\nevent: {event['kind']}\ndata: {json.dumps(event)}\n\n".encode()
                if not news["events"]:
                    yield b": nothing new\n\n"
        except ControlError as error:
            yield f"event: end\ndata: {json.dumps({'reason': str(error)})}\n\n".encode()
        finally:
            self._num_followers -= 1

    def ensure_room(self) -> None:
        """Refuse one more follower of events when there are too many.

        Raises:
            ApiError: 503.
        """
        if self._num_followers >= MAX_FOLLOWERS:
            raise ApiError(503, f"{MAX_FOLLOWERS} callers follow the events here already", "overloaded_error")


def scale_router(control: ControlClient) -> APIRouter:
    """Return the routes of scaling."""
    router, scaling = APIRouter(), Scaling(control)
    _add_elastic_routes(router, scaling)
    _add_operation_routes(router, scaling)
    _add_watch_routes(router, scaling)
    return router


def _add_elastic_routes(router: APIRouter, scaling: Scaling) -> None:
    @router.post("/scale_elastic_ep")
    async def scale_elastic_ep(body: ElasticBody) -> dict[str, Any]:
        await scaling.scale_and_wait(body.new_data_parallel_size, body.drain_timeout)
        return {"message": f"Scaled to {body.new_data_parallel_size} data parallel engines"}

    @router.post("/is_scaling_elastic_ep")
    async def is_scaling_elastic_ep() -> dict[str, Any]:
        return {"is_scaling_elastic_ep": await scaling.is_running()}


def _add_operation_routes(router: APIRouter, scaling: Scaling) -> None:
    @router.post("/v1/cluster/scale")
    async def scale(body: ScaleBody, idempotency_key: Annotated[str | None, Header(max_length=256)] = None) -> Any:
        key = idempotency_key or body.idempotency_key
        operation = await scaling.ask(Scale(body.size, body.remove, body.drain_timeout, key))
        where = {"location": f"/v1/cluster/operations/{operation['id']}"}
        return JSONResponse(operation, status_code=_ACCEPTED, headers=where)

    @router.get("/v1/cluster/operations")
    async def operations() -> dict[str, Any]:
        return {"operations": await scaling.ask(ListScales())}

    @router.get("/v1/cluster/operations/{operation_id}")
    async def operation(operation_id: str) -> Any:
        return await scaling.ask(GetScale(operation_id))

    @router.post("/v1/cluster/operations/{operation_id}/cancel")
    async def cancel(operation_id: str) -> Any:
        return JSONResponse(await scaling.ask(CancelScale(operation_id)), status_code=_ACCEPTED)


def _add_watch_routes(router: APIRouter, scaling: Scaling) -> None:
    @router.get("/v1/cluster/capacity")
    async def capacity() -> Any:
        return await scaling.ask(GetCapacity())

    @router.get("/v1/cluster/events")
    async def events(
        after: Annotated[int | None, Query(ge=0)] = None,
        last_event_id: Annotated[int | None, Header(ge=0)] = None,
    ) -> Any:
        """Server-sent events; ``after`` or ``Last-Event-ID`` begins behind an event, else with what happens next."""
        scaling.ensure_room()
        stream = scaling.follow(last_event_id if after is None else after)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})
