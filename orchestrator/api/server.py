"""The life of one API process: listen at once, wait for engines, serve, drain, go.

uvicorn's own ``serve`` is not used: it takes the signals for itself, ignores SIGTERM while its lifespan start-up waits,
and wakes ten times a second when idle. Its parts are driven in order here instead.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from fastapi import APIRouter
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from client.dplb_async_mp_client import DPLBAsyncMPClient
from engine.wire.errors import ShoalError, StartupError
from engine.wire.ids import EngineId
from engine.wire.messages import ClusterSettings
from engine.wire.process import set_log_level
from lb.totals import RankTotals
from lb.views import EngineState
from metrics.deployment import DeploymentReading, DeploymentStats
from metrics.loop_lag import LoopLag
from orchestrator.api.acceptor import Acceptor
from orchestrator.api.admin import Admin
from orchestrator.api.admin_routes import ServerInfo, admin_router
from orchestrator.api.admission import Admission
from orchestrator.api.app import AppContext, make_app
from orchestrator.api.auth import Guard, KeyRing
from orchestrator.api.catch_up import any_is_loading, wait_reaches_all
from orchestrator.api.config import ApiSpec
from orchestrator.api.generation import GenerationApp
from orchestrator.api.move_meter import MoveMeter
from orchestrator.api.open_requests import OpenRequests
from orchestrator.api.scale_routes import scale_router
from orchestrator.control.calls import Handler
from orchestrator.control.client import ControlClient
from orchestrator.control.messages import AbortRequests, ListReached
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_DATE_INTERVAL_S = 1.0
_LAST_MESSAGE_S = 2.0
_KEEP_ALIVE_S = 60
_CATCH_UP_S = 5.0
_SHOW_S = 0.05
_CLOSE_S = 1  # for connections whose caller never finished its request


class ApiServer:
    """One API process from first to last breath, on one event loop."""

    def __init__(self, spec: ApiSpec, tokenizer: TextTokenizer) -> None:
        """Build all parts; nothing listens yet. Must run on the event loop that will serve."""
        self._spec = spec
        client_id = spec.client.client_id
        self._stats = DeploymentStats(client_id.index, client_id.incarnation, spec.stats)
        stats = self._stats.stats
        self._client = DPLBAsyncMPClient(spec.client, RankTotals(self._stats.totals_record))
        self._llm = AsyncLLM(self._client, tokenizer, stats)
        self._admission = Admission(spec.max_pending_requests, self._stats.row, self._stats.siblings)
        self._move_meter = MoveMeter(stats)
        self._lag = LoopLag(asyncio.get_running_loop(), self._beat)
        self._open_requests = OpenRequests()
        asked: dict[type, Handler] = {AbortRequests: self._abort_requests, ListReached: self._list_reached}
        self._control = ControlClient(client_id, spec.control_endpoint, asked)
        self._client.on_settings = self._follow
        context = AppContext(
            llm=self._llm,
            admission=self._admission,
            read_stats=self._read_stats,
            index=client_id.index,
            served_model_name=spec.served_model_name,
            model_root=spec.model_root,
            settings=lambda: self._client.settings,
            routes=[self._admin_router(), scale_router(self._control)],
        )
        app: Any = GenerationApp(
            self._llm, self._admission, stats, spec.served_model_name, self._open_requests, make_app(context)
        )
        keys = KeyRing(spec.api_keys, spec.admin_api_key)
        self._http = uvicorn.Server(_http_config(app if keys.is_empty else Guard(keys, stats, app), spec.log_level))
        self._acceptor = self._make_acceptor()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal or the loss of all engines' line; return the exit status."""
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
        await self._http.startup([])
        await self._http.on_tick(0)
        if self._spec.client.client_id.incarnation > 1:
            await wait_reaches_all(self._client.engine_views, _CATCH_UP_S, self._stop)
        self._acceptor.start()
        _say_listening(self._spec)

    async def _serve(self) -> int:
        """Answer until told to stop; the engines are waited for while ``/health`` and ``/ready`` answer already."""
        engines = asyncio.create_task(self._client.wait_ready(self._spec.start_timeout_s), name="api-wait-engines")
        line = asyncio.create_task(self._llm.wait_closed(), name="api-line-closed")
        stop = asyncio.create_task(self._stop.wait(), name="api-stop")
        clock = asyncio.create_task(self._tick_date(), name="api-date")
        show = asyncio.create_task(self._show_start(), name="api-show-start")
        try:
            await asyncio.wait({engines, line, stop}, return_when=asyncio.FIRST_COMPLETED)
            if engines.done():
                engines.result()
                logger.info("serving %s on %s", self._spec.served_model_name, self._spec.url)
                await asyncio.wait({line, stop}, return_when=asyncio.FIRST_COMPLETED)
            return 0 if stop.done() else 1
        except StartupError as error:
            logger.error("%s", error)  # noqa: TRY400 - an expected end: one clear line, no traceback
            return 1
        finally:
            tasks = (engines, line, stop, clock, show)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self) -> None:
        """Take no more, let streams end, abort the rest so that each gets its last message."""
        self._admission.drain()
        self._acceptor.close()
        await self._wait_empty(self._spec.shutdown_timeout_s)
        if self._admission.num_open:
            logger.info("aborting %d requests that did not finish in time", self._admission.num_open)
            await self._llm.abort_all()
            self._stop_now.clear()
            await self._wait_empty(_LAST_MESSAGE_S)

    async def _wait_empty(self, timeout_s: float) -> None:
        """Wait until no request is open, the time is over or a second signal came."""
        tasks = {
            asyncio.create_task(self._admission.wait_empty(), name="api-wait-empty"),
            asyncio.create_task(self._stop_now.wait(), name="api-stop-now"),
        }
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self) -> None:
        """Close connections, then the text facade, then the line: each may still use the next."""
        self._http.force_exit = True
        await self._acceptor.aclose()
        if self._http.started:
            await self._http.shutdown()
        self._lag.close()
        await self._control.aclose()
        await self._llm.aclose()
        with contextlib.suppress(ShoalError):  # the line may be closed already: that may be why we end
            await self._client.aclose()

    def _admin_router(self) -> APIRouter:
        info = ServerInfo(
            served_model_name=self._spec.served_model_name,
            model_root=self._spec.model_root,
            api_process=str(self._spec.client.client_id),
            serve_config=self._spec.serve_config,
        )
        return admin_router(Admin(self._client, self._control), self._llm, info)

    def _make_acceptor(self) -> Acceptor:
        config, state = self._http.config, self._http.server_state
        config.load()
        self._http.lifespan = config.lifespan_class(config)

        def make_protocol(on_lost: Callable[[], None]) -> asyncio.Protocol:
            return _CountedProtocol(on_lost, config, state, self._http.lifespan.state)

        listener = socket.socket(fileno=self._spec.listen_fd)
        return Acceptor(listener, make_protocol, self._stats.row, self._stats.siblings)

    def _beat(self) -> None:
        statistics = self._client.statistics()
        self._move_meter.update(statistics)
        self._stats.on_beat(
            self._lag.worst_s(),
            self._client.snapshot_age_s(),
            self._client.engine_views(),
            statistics["waiting_to_move"],
        )

    def _read_stats(self) -> DeploymentReading:
        self._beat()
        return self._stats.read()

    async def _list_reached(self, _: ListReached) -> list[EngineId]:
        """Return the engines that can be sent to."""
        views = self._client.engine_views()
        return [view.engine_id for view in views if view.state in (EngineState.READY, EngineState.LEAVING)]

    async def _abort_requests(self, operation: AbortRequests) -> list[str]:
        """End what this process has of these requests; return the names it knew."""
        found = self._open_requests.find(operation.names)
        for streams in found.values():
            for stream in streams:
                await self._llm.abort(stream)
        return sorted(found)

    def _follow(self, settings: ClusterSettings) -> None:
        set_log_level(settings.log_level or self._spec.log_level)

    async def _show_start(self) -> None:
        """Say at once which engines are reached: the start of the deployment waits for it."""
        while any_is_loading(self._client.engine_views()):
            self._beat()
            await asyncio.sleep(_SHOW_S)
        self._beat()

    async def _tick_date(self) -> None:
        while True:
            await asyncio.sleep(_DATE_INTERVAL_S)
            await self._http.on_tick(0)

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


class _CountedProtocol(HttpToolsProtocol):
    """One connection; says when it is lost."""

    def __init__(self, on_lost: Callable[[], None], *uvicorn_arguments: Any) -> None:
        super().__init__(*uvicorn_arguments)
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()


def _http_config(app: Any, log_level: str) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        log_level=log_level.lower(),
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_S,
    )


def _say_listening(spec: ApiSpec) -> None:
    """Print the one ready line the supervisor reads."""
    line = msgspec.json.encode({"url": spec.url, "host": spec.host, "port": spec.port})
    sys.stdout.write(line.decode() + "\n")
    sys.stdout.flush()
