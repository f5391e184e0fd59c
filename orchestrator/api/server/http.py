"""HTTP on the port of the deployment: uvicorn's parts, driven in order.

uvicorn's own ``serve`` is not used: it takes the signals for itself, ignores SIGTERM while its lifespan start-up waits,
and wakes ten times a second when idle. What is used instead is checked at the start (``uvicorn_guard.py``).
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from metrics.shared_status import StatusRow
from orchestrator.api.server.acceptor import Acceptor

_DATE_INTERVAL_S = 1.0

CONFIG: Mapping[str, Any] = {
    "http": "httptools",
    "ws": "none",
    "interface": "asgi3",
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "timeout_keep_alive": 60,
    "timeout_graceful_shutdown": 1,  # for connections whose caller never finished its request
}
"""Arguments of ``uvicorn.Config`` that are always the same."""


class HttpServer:
    """Serves one ASGI application to the connections that this process takes from the shared socket."""

    def __init__(self, app: Any, log_level: str, listen_fd: int, row: StatusRow, siblings: Sequence[StatusRow]) -> None:
        """Build; nothing is taken yet. listen_fd: a socket that listens. row, siblings: see ``Acceptor``."""
        config = uvicorn.Config(app, log_level=log_level.lower(), **CONFIG)
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

        def make_protocol(on_lost: Callable[[], None]) -> asyncio.Protocol:
            return _CountedProtocol(on_lost, config, self._server.server_state, self._server.lifespan.state)

        self._acceptor = Acceptor(socket.socket(fileno=listen_fd), make_protocol, row, siblings)

    async def prepare(self) -> None:
        """Get ready to serve; connections still wait in the socket's queue."""
        await self._server.startup([])
        await self._server.on_tick(0)

    def open(self) -> None:
        """Take connections from now on."""
        self._acceptor.start()

    async def keep_date(self) -> None:
        """Keep the date in the responses' headers right, until cancelled."""
        while True:
            await asyncio.sleep(_DATE_INTERVAL_S)
            await self._server.on_tick(0)  # a multiple of 10 renews the date

    def shut(self) -> None:
        """Take no more connections; those that are open stay."""
        self._acceptor.close()

    async def aclose(self) -> None:
        """Close every connection."""
        self._server.force_exit = True
        await self._acceptor.aclose()
        if self._server.started:
            await self._server.shutdown()


class _CountedProtocol(HttpToolsProtocol):
    """One connection; reports when it is lost."""

    def __init__(self, on_lost: Callable[[], None], *uvicorn_arguments: Any) -> None:
        super().__init__(*uvicorn_arguments)
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()
