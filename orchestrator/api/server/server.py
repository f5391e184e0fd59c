"""The life of an API process: listen at once, wait for engines, serve, drain, close.

``ApiServer`` builds every part and is the only one that knows them all; ``run`` reads as the process lives.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
from fastapi import APIRouter

from client.dplb_async_mp_client import DPLBAsyncMPClient
from engine.wire.control import ClusterSettings
from engine.wire.errors import ShoalError, StartupError
from engine.wire.ids import EngineId
from engine.wire.process import set_log_level
from engine.wire.states import EngineState
from lb.views.totals import RankTotals
from metrics.deployment import DeploymentStats
from orchestrator.api.admin.admin import Admin
from orchestrator.api.admin.app import AppContext, Interruptible, make_app
from orchestrator.api.admin.auth import Guard, KeyRing
from orchestrator.api.admin.routes import ServerInfo, admin_router
from orchestrator.api.admin.scale_routes import scale_router
from orchestrator.api.base.waits import wait_reaches_all
from orchestrator.api.server.config import ApiSpec
from orchestrator.api.server.http import HttpServer
from orchestrator.api.server.status_reporter import StatusReporter
from orchestrator.api.serving.admission import Admission, OpenRequests
from orchestrator.api.serving.generation import GenerationApp
from orchestrator.control.calls import Handler
from orchestrator.control.client import ControlClient
from orchestrator.control.messages import AbortRequests, ListReached
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_LAST_MESSAGE_S = 2.0
_CATCH_UP_S = 5.0


class ApiServer:
    """One API process from its start to its end, on one event loop."""

    def __init__(self, spec: ApiSpec, tokenizer: TextTokenizer) -> None:
        """Build all parts; nothing listens yet. Must run on the event loop that will serve."""
        self._spec = spec
        client_id = spec.client.client_id
        self._stats = DeploymentStats(client_id.index, client_id.incarnation, spec.stats)
        stats = self._stats.stats
        self._client = DPLBAsyncMPClient(spec.client, RankTotals(self._stats.totals_record))
        self._llm = AsyncLLM(self._client, tokenizer, stats)
        self._admission = Admission(spec.max_pending_requests, self._stats.row, self._stats.siblings)
        self._status = StatusReporter(self._client, self._stats)
        self._open_requests = OpenRequests()
        asked: dict[type, Handler] = {AbortRequests: self._abort_requests, ListReached: self._list_reached}
        self._control = ControlClient(client_id, spec.control_endpoint, asked)
        self._client.on_settings = self._follow
        self._calls = Interruptible(make_app(self._app_context()))
        self._http = HttpServer(self._make_app(), spec.log_level, spec.listen_fd, self._stats.row, self._stats.siblings)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Serve until SIGTERM, the loss of all engines or a failure; return the exit status."""
        with self._signals():
            try:
                await self._start()
                status = await self._serve()
                await self._drain()
            finally:
                await self._close()
        return status

    async def _start(self) -> None:
        self._llm.start()
        self._control.start()
        await self._http.prepare()
        if self._spec.client.client_id.incarnation > 1:
            # its siblings serve: callers must not meet a process that reaches half of the ranks
            await wait_reaches_all(self._client.engine_views, _CATCH_UP_S, self._stop)
        self._http.open()
        _say_listening(self._spec)

    async def _serve(self) -> int:
        """Serve until a stop is asked for; ``/health`` and ``/ready`` answer while the engines are waited for.

        Returns the exit status: 0 for a stop that was asked for, 1 when the engines are out of reach or a task failed.
        """
        engines = asyncio.create_task(self._client.wait_ready(self._spec.start_timeout_s), name="api-wait-engines")
        closed = asyncio.create_task(self._llm.wait_closed(), name="api-engines-closed")
        stop = asyncio.create_task(self._stop.wait(), name="api-stop")
        date = asyncio.create_task(self._http.keep_date(), name="api-date")
        show = asyncio.create_task(self._status.show_start(), name="api-show-start")
        pending = tasks = {engines, closed, stop, date, show}
        try:
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                # Failures first: whatever else has ended, a process with a part that is dead must not go on.
                if [task for task in done if _has_failed(task)]:
                    return 1
                if stop in done or closed in done:
                    return 0 if stop in done else 1
                if engines in done:
                    logger.info("serving %s on %s", self._spec.served_model_name, self._spec.url)
        finally:
            await _cancel(tasks)

    async def _drain(self) -> None:
        """Take no more, let streams end, abort the rest so that each gets its last message.

        A second signal ends the wait for the streams, not the one for the last messages.
        """
        self._admission.drain()
        self._http.shut()
        await self._wait_empty(self._spec.shutdown_timeout_s)
        if self._admission.num_open:
            logger.info("aborting %d requests that did not finish in time", self._admission.num_open)
            await self._llm.abort_all()
            self._stop_now.clear()  # a third signal ends this wait too
            await self._wait_empty(_LAST_MESSAGE_S)

    async def _wait_empty(self, timeout_s: float) -> None:
        """Wait until no request is open, the time is over or a second signal came."""
        tasks = {
            asyncio.create_task(self._admission.wait_empty(), name="api-wait-empty"),
            asyncio.create_task(self._stop_now.wait(), name="api-stop-now"),
        }
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(tasks)

    async def _close(self) -> None:
        """Answer calls that wait, close connections, then the text facade, then the client: each may use the next."""
        await self._calls.aclose()
        await self._http.aclose()
        self._status.close()
        await self._control.aclose()
        await self._llm.aclose()
        with contextlib.suppress(ShoalError):  # it may be closed already: that may be why this process ends
            await self._client.aclose()

    def _make_app(self) -> Any:
        """Return the whole ASGI application: keys, then generation, then everything else."""
        spec, stats = self._spec, self._stats.stats
        app = GenerationApp(self._llm, self._admission, stats, spec.served_model_name, self._open_requests, self._calls)
        keys = KeyRing(spec.api_keys, spec.admin_api_key)
        return app if keys.is_empty else Guard(keys, stats, app)

    def _app_context(self) -> AppContext:
        spec = self._spec
        return AppContext(
            llm=self._llm,
            is_draining=lambda: self._admission.draining,
            read_stats=self._status.read,
            index=spec.client.client_id.index,
            served_model_name=spec.served_model_name,
            model_root=spec.model_root,
            settings=lambda: self._client.settings,
            group=self._client.group_view,
            routes=[self._admin_router(), scale_router(self._control)],
        )

    def _admin_router(self) -> APIRouter:
        info = ServerInfo(
            served_model_name=self._spec.served_model_name,
            model_root=self._spec.model_root,
            api_process=str(self._spec.client.client_id),
            serve_config=self._spec.serve_config,
        )
        return admin_router(Admin(self._client, self._control), self._llm, info)

    async def _list_reached(self, _: ListReached) -> list[EngineId]:
        """Return the engines that can be sent to."""
        views = self._client.engine_views()
        return [view.engine_id for view in views if view.state not in (EngineState.LOADING, EngineState.DEAD)]

    async def _abort_requests(self, operation: AbortRequests) -> list[str]:
        """End what this process has of these requests; return the names it knew."""
        found = self._open_requests.find(operation.names)
        for streams in found.values():
            for stream in streams:
                await self._llm.abort(stream)
        return sorted(found)

    def _follow(self, settings: ClusterSettings) -> None:
        set_log_level(settings.log_level or self._spec.log_level)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    def _on_terminate(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()


def _has_failed(task: "asyncio.Task[Any]") -> bool:
    """Tell whether a task ended with an exception, and log it."""
    error = task.exception()
    if isinstance(error, StartupError):
        logger.error("%s", error)  # an expected end: one clear line, no traceback
    elif error is not None:
        logger.error("the task %s failed, so this process ends", task.get_name(), exc_info=error)
    return error is not None


async def _cancel(tasks: "Collection[asyncio.Task[Any]]") -> None:
    """End tasks; one that fails meanwhile is logged."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in running:
        if not task.cancelled():
            _has_failed(task)


def _say_listening(spec: ApiSpec) -> None:
    """Print the one line that tells the supervisor where this process listens."""
    line = msgspec.json.encode({"url": spec.url, "host": spec.host, "port": spec.port})
    sys.stdout.write(line.decode() + "\n")
    sys.stdout.flush()
