"""The FastAPI application for everything but generation: models, health, readiness, cluster, metrics, version.

Its routes cost 0.3 ms per request, which is fine for what people and probes ask.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.wire.build import build_id
from engine.wire.control import ClusterSettings
from engine.wire.errors import ShoalError
from lb.views.group_view import GroupView
from metrics.collector import make_registry, render
from metrics.deployment import DeploymentReading
from orchestrator.api.admin.cluster import (
    describe_api_server,
    describe_group,
    describe_rank,
    describe_readiness,
    describe_settings,
)
from orchestrator.api.base.asgi import Message, Receive, Send, request_id_of, send_error
from orchestrator.api.base.errors import ApiError, to_api_error
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.processes.waits import run_unless

_ANSWER_S = 1.0  # a cancelled call has nothing left to do but to send its response


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext:
    """The sources of the routes' responses.

    is_draining: whether this process takes no new requests any more. read_stats: what all API processes count and show.
    index: which of them this is.
    settings: what the operator wants. group: the lockstep group, None for independent ranks. routes: more of them.
    """

    llm: AsyncLLM
    is_draining: Callable[[], bool]
    read_stats: Callable[[], DeploymentReading]
    index: int
    served_model_name: str
    model_root: str
    settings: Callable[[], ClusterSettings]
    group: Callable[[], GroupView | None] = lambda: None
    routes: Sequence[APIRouter] = ()


def make_app(context: AppContext) -> FastAPI:
    """Return the application behind the generation endpoints."""
    app = FastAPI(title="Shoal", version=build_id(), docs_url=None, redoc_url=None, openapi_url=None)
    _add_state_routes(app, context)
    _add_model_routes(app, context)
    for router in context.routes:
        app.include_router(router)
    app.add_exception_handler(RequestValidationError, _on_error)
    app.add_exception_handler(ShoalError, _on_error)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    return app


def _add_state_routes(app: FastAPI, context: AppContext) -> None:
    registry = make_registry(context.read_stats, context.llm.engine_views, context.group)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say that this process is alive; whether it can serve is ``/ready``'s answer."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        is_ready, body = describe_readiness(context.llm.engine_views(), context.is_draining())
        return JSONResponse(body, 200 if is_ready else 503)

    @app.get("/v1/cluster")
    async def cluster() -> dict[str, Any]:
        return _describe_cluster(context)

    @app.get("/metrics")
    async def metrics() -> Response:
        text, content_type = render(registry)
        return Response(text, headers={"content-type": content_type})

    @app.get("/version")
    async def version() -> dict[str, str]:
        number, _, wire = build_id().partition("+")
        return {"version": number, "wire": wire}


def _describe_cluster(context: AppContext) -> dict[str, Any]:
    reading = context.read_stats()
    return {
        "object": "cluster",
        "ranks": [describe_rank(view, reading) for view in context.llm.engine_views()],
        "group": describe_group(context.group(), reading),
        "pending_requests": sum(server.num_open for server in reading.servers),
        "draining": context.is_draining(),
        "settings": describe_settings(context.settings()),
        "answered_by": context.index,
        "api_servers": [describe_api_server(server) for server in reading.servers],
        "statistics": context.llm.statistics(),
    }


def _add_model_routes(app: FastAPI, context: AppContext) -> None:
    created = int(time.time())

    def entry() -> dict[str, Any]:
        ready = next((view.ready for view in context.llm.engine_views() if view.ready is not None), None)
        return {
            "id": context.served_model_name,
            "object": "model",
            "created": created,
            "owned_by": "shoal",
            "root": context.model_root,
            "max_model_len": None if ready is None else ready.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != context.served_model_name:
            raise HTTPException(404, f"the model {name!r} does not exist here")
        return entry()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404 and message == "Not Found":
        message = f"there is no {request.url.path} here"
    if error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    answer = ApiError(error.status_code, message, kind)
    return JSONResponse(answer.content(), answer.status, headers=dict(error.headers or {}))


async def _on_error(request: Request, error: Exception) -> Response:
    answer = to_api_error(error)
    return JSONResponse(answer.content(), answer.status, headers=answer.headers())


class Interruptible:
    """An ASGI callable around an application whose calls wait for something.

    Without it, a call that waits when the loop ends is cancelled from outside: its caller gets a 500, and the log a
    traceback. A response that has begun is left alone: it ends with what it is made from.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._waiting: dict[asyncio.Task[Any], asyncio.Future[None]] = {}  # calls whose response has not begun

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        task = asyncio.current_task()
        assert task is not None
        interrupt = self._waiting[task] = asyncio.get_running_loop().create_future()

        async def send_on(message: Message) -> None:
            self._waiting.pop(task, None)
            await send(message)

        try:
            has_ended = await run_unless(self._app(scope, receive, send_on), interrupt)
        finally:
            self._waiting.pop(task, None)
        if not has_ended:
            await send_error(_stopping(), request_id_of(dict(scope["headers"])), send)

    async def aclose(self) -> None:
        """Answer every call that has not begun its response with 503."""
        waiting, self._waiting = self._waiting, {}
        for interrupt in waiting.values():
            interrupt.set_result(None)
        if waiting:
            await asyncio.wait(waiting, timeout=_ANSWER_S)


def _stopping() -> ApiError:
    message = "the server is shutting down and waits for this no longer; what was begun may still be done"
    return ApiError(503, message, "server_error", code="shutting_down", retry_after_s=1)
