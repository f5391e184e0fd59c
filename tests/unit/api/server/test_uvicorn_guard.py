"""The guard against a uvicorn whose internals are others: the installed version passes, changed ones are refused."""

import asyncio
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.wire.errors import StartupError
from orchestrator.api.server import uvicorn_guard
from orchestrator.api.server.uvicorn_guard import SUPPORTED, check_uvicorn

PYPROJECT = Path(__file__).parents[4] / "pyproject.toml"


def test_the_installed_uvicorn_has_what_this_server_leans_on() -> None:
    """Fails by name at a version that changed: look at what it names before the bound in pyproject.toml is raised."""
    check_uvicorn()


def test_the_range_that_is_recommended_is_the_one_that_is_installed_from() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert f"uvicorn{SUPPORTED}" in dependencies


class RenamedFlow(RequestResponseCycle):
    """Keeps its flow control under another name."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.flow_control = self.flow
        del self.flow


class OtherFraming(RequestResponseCycle):
    """Writes every chunk with an extension, which HTTP allows and our own chunks have not."""

    async def send(self, message: Any) -> None:
        if message.get("body"):
            self.transport.write(b"%x;q=1\r\n%b\r\n" % (len(message["body"]), message["body"]))
        else:
            await super().send(message)


class SendThatWaits(RequestResponseCycle):
    """Yields to the loop in every send."""

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)
        await super().send(message)


class OtherArguments(RequestResponseCycle):
    """Is built from something else."""

    def __init__(self, connection: Any) -> None:
        super().__init__(**connection)


class OtherPausing(FlowControl):
    """Has an event in place of the flag."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.__dict__["writable"] = self.__dict__.pop("write_paused")

    def pause_writing(self) -> None:
        self.__dict__["writable"] = False


class OtherProtocol(HttpToolsProtocol):
    """Takes one argument for three."""

    def __init__(self, server: Any) -> None:
        super().__init__(server.config, server.state, {})


def without(owner: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.delattr(owner, name)


def instead(changed: type) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(uvicorn_guard, changed.__mro__[1].__name__, changed)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (instead(RenamedFlow), "flow"),
        (instead(OtherFraming), "a chunked response is written as"),
        (instead(SendThatWaits), "send wanted to wait"),
        (instead(OtherArguments), "cannot be driven as before"),
        (instead(OtherPausing), "OtherPausing has no write_paused"),
        (instead(OtherProtocol), "OtherProtocol takes no config, server_state, app_state"),
        (without(uvicorn.Server, "on_tick"), "on_tick"),
        (without(uvicorn.Server, "shutdown"), "Server has no shutdown"),
        (without(RequestResponseCycle, "receive"), "RequestResponseCycle has no receive"),
    ],
)
def test_a_uvicorn_with_other_internals_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], named: str
) -> None:
    change(monkeypatch)
    monkeypatch.setattr(uvicorn, "__version__", "9.9.9")
    with pytest.raises(StartupError, match=named) as refused:
        check_uvicorn()
    assert "uvicorn 9.9.9" in str(refused.value)
    assert f"install uvicorn{SUPPORTED}" in str(refused.value)
