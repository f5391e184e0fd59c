"""What becomes of calls that wait when the process stops: the real framework below, no socket above."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from orchestrator.api.admin.app import Interruptible


class Caller:
    """One call; what it was sent, in order."""

    def __init__(self, app: Any, path: str) -> None:
        self.sent: list[Any] = []
        self._has_asked = False
        self._has_started = asyncio.Event()
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"x-request-id", b"mine")],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._has_asked:  # the framework asks again, to hear of a caller who goes away: this one stays
            await asyncio.Event().wait()
        self._has_asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self._has_started.set()

    async def wait_started(self) -> None:
        await self._has_started.wait()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class WaitingCalls:
    """An application with a call that waits, one that streams, and one that answers."""

    def __init__(self) -> None:
        self.waits, self.may_end = asyncio.Event(), asyncio.Event()
        app = FastAPI()
        self.app = Interruptible(app)

        @app.get("/wait")
        async def wait() -> None:
            self.waits.set()
            await asyncio.Event().wait()

        @app.get("/stream")
        async def stream() -> Any:
            async def lines() -> AsyncIterator[bytes]:
                yield b"first "
                await self.may_end.wait()
                yield b"last"

            return StreamingResponse(lines())

        @app.get("/answer")
        async def answer() -> int:
            return 7


async def test_a_call_that_waits_is_told_that_the_process_stops(caplog: pytest.LogCaptureFixture) -> None:
    calls = WaitingCalls()
    caller = Caller(calls.app, "/wait")
    await calls.waits.wait()
    with caplog.at_level(logging.DEBUG):
        await calls.app.aclose()
    assert caller.task.done()
    assert caller.task.exception() is None
    assert caller.status == 503
    assert json.loads(caller.body)["error"]["code"] == "shutting_down"
    assert (b"x-request-id", b"mine") in caller.sent[0]["headers"]
    assert "Traceback" not in caplog.text


async def test_an_answer_that_has_begun_is_left_alone() -> None:
    calls = WaitingCalls()
    caller = Caller(calls.app, "/stream")
    await caller.wait_started()
    await calls.app.aclose()
    assert not caller.task.done()
    calls.may_end.set()
    await caller.task
    assert (caller.status, caller.body) == (200, b"first last")


async def test_a_call_that_is_answered_leaves_nothing_to_wait_for() -> None:
    calls = WaitingCalls()
    caller = Caller(calls.app, "/answer")
    await caller.task
    assert (caller.status, caller.body) == (200, b"7")
    await calls.app.aclose()
    await calls.app.aclose()


async def test_a_caller_that_goes_away_takes_its_call_along() -> None:
    calls = WaitingCalls()
    caller = Caller(calls.app, "/wait")
    await calls.waits.wait()
    caller.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller.task
    assert caller.sent == []
    await calls.app.aclose()
