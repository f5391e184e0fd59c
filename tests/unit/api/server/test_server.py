"""The life of an API process without engines: the real parts, on a socket and endpoints of their own."""

import asyncio
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from client.config import ClientConfig
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import ClientId
from orchestrator.api.server.config import ApiSpec
from orchestrator.api.server.server import ApiServer
from orchestrator.llm.tokenizer import byte_tokenizer


@pytest.fixture
def spec() -> Iterator[ApiSpec]:
    folder = Path(tempfile.mkdtemp(prefix="st", dir="/tmp"))  # short: a Unix socket's path has 107 bytes at most
    names = ("report_endpoint", "state_endpoint", "request_bind", "output_bind")
    endpoints: dict[str, Any] = {name: ipc_endpoint(folder, name) for name in names}
    client = ClientConfig(client_id=ClientId(0, 1), build_id="b", config_hash="h", **endpoints)
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    yield ApiSpec(client=client, listen_fd=listener.detach(), host=host, port=port, served_model_name="sim")
    shutil.rmtree(folder)


async def fail() -> NoReturn:
    raise RuntimeError("broken on purpose")


async def test_a_process_that_is_asked_to_stop_ends_without_an_error(spec: ApiSpec) -> None:
    server = ApiServer(spec, byte_tokenizer())
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    assert await server.run() == 0


@pytest.mark.parametrize(
    ("part", "method", "task"), [("_http", "keep_date", "api-date"), ("_status", "show_start", "api-show-start")]
)
async def test_a_task_that_fails_ends_the_process_with_an_error_that_names_it(
    spec: ApiSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, method: str, task: str
) -> None:
    server = ApiServer(spec, byte_tokenizer())
    monkeypatch.setattr(getattr(server, part), method, fail)
    with caplog.at_level(logging.ERROR):
        assert await server.run() == 1
    assert f"the task {task} failed" in caplog.text
    assert "broken on purpose" in caplog.text
