"""The uvicorn guard: checks at the start of the process the internals of uvicorn that this server leans on.

``http.py`` drives the parts of ``uvicorn.Server`` by itself, and ``serving/stream_writer.py`` writes chunks past
``send``. Neither is a documented interface. A version that does these things otherwise might start and then garble
responses, so what is leaned on is looked up by name, and one response is sent through and compared byte by byte.
"""

import asyncio
import inspect
import logging
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.wire.errors import StartupError
from orchestrator.api.server.http import CONFIG
from orchestrator.api.serving.stream_writer import CHUNK, run_through

SUPPORTED = ">=0.30,<0.56"
"""The range of versions in ``pyproject.toml``; a test compares the two."""

_STARTED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


def check_uvicorn() -> None:
    """Check that the installed uvicorn is made as this server expects.

    Raises:
        StartupError: it is not; names its version and what is missing or different.
    """
    # One after the other: without the names a response could not even be tried.
    for find in (_other_signatures, _missing_names, _other_behaviour):
        try:
            problems = list(find())
        except Exception as error:  # noqa: BLE001 - whatever an unknown version raises, it is not one we know
            problems = [f"it cannot be driven as before ({type(error).__name__}: {error})"]
        if problems:
            break
    if problems:
        raise StartupError(
            f"uvicorn {uvicorn.__version__} has other internals than this server writes to: {'; '.join(problems)}; "
            f"install uvicorn{SUPPORTED}"
        )


def _missing_names() -> Iterator[str]:
    config = uvicorn.Config(_app, **CONFIG)
    config.load()
    leaned_on: list[tuple[object, tuple[str, ...]]] = [
        (config, ("lifespan_class",)),
        (uvicorn.Server(config), ("server_state", "started", "force_exit", "startup", "on_tick", "shutdown")),
        (FlowControl(_RecordingTransport()), ("write_paused",)),
        (RequestResponseCycle, ("send", "receive")),
        (HttpToolsProtocol, ("connection_lost",)),
    ]
    for owner, names in leaned_on:
        kind = owner if isinstance(owner, type) else type(owner)
        yield from (f"{kind.__name__} has no {name}" for name in names if not hasattr(owner, name))


def _other_signatures() -> Iterator[str]:
    expected: list[tuple[Any, tuple[str, ...]]] = [
        (uvicorn.Config, ("app", "log_level", *CONFIG)),
        (uvicorn.Server.startup, ("sockets",)),
        (uvicorn.Server.on_tick, ("counter",)),
        (HttpToolsProtocol, ("config", "server_state", "app_state")),
    ]
    for called, names in expected:
        missing = [name for name in names if name not in inspect.signature(called).parameters]
        if missing:
            yield f"{called.__qualname__} takes no {', '.join(missing)}"


def _other_behaviour() -> Iterator[str]:
    """Send one response through a request's cycle, as ``StreamWriter`` does, and compare what is written."""
    transport = _RecordingTransport()
    flow = FlowControl(transport)
    cycle = RequestResponseCycle(
        scope=cast(Any, {"type": "http", "method": "POST", "headers": []}),
        transport=transport,
        flow=flow,
        logger=logging.getLogger(__name__),
        access_logger=logging.getLogger(__name__),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )
    for name, value in {"transport": transport, "flow": flow, "disconnected": False}.items():
        if getattr(cycle, name, None) is not value:
            yield f"RequestResponseCycle has no {name} as it used to"
    if getattr(cycle.send, "__self__", None) is not cycle:
        yield "RequestResponseCycle.send is not bound to its cycle"
    run_through(cycle.send({"type": "http.response.start", "status": 200, "headers": []}))
    run_through(cycle.send({"type": "http.response.body", "body": b"one", "more_body": True}))
    run_through(cycle.send({"type": "http.response.body", "body": b"", "more_body": False}))
    written = b"".join(transport.written)
    if written != _STARTED + CHUNK % (3, b"one") + _LAST_CHUNK:
        yield f"a chunked response is written as {written!r}"
    if run_through(cycle.receive())["type"] != "http.disconnect":
        yield "receive does not report that a response is complete"
    flow.pause_writing()
    if flow.write_paused is not True:
        yield "FlowControl.write_paused does not report a full transport"


class _RecordingTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False


async def _app(_scope: Any, _receive: Any, _send: Any) -> None:
    """Answer nothing: only there to build a configuration."""
