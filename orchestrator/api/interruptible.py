"""Calls that may wait for minutes, as a scale or a drain does, are answered when the process stops."""

import asyncio
from collections.abc import Mapping
from typing import Any

from orchestrator.api.errors import ApiError
from orchestrator.api.request_ids import request_id_of
from orchestrator.api.stream_writer import Message, Receive, Send, send_error
from orchestrator.processes.waits import run_unless

_ANSWER_S = 1.0  # a cancelled call has nothing to do but to say so


class Interruptible:
    """An ASGI callable around an application whose calls wait for something.

    Without it, a call that waits when the loop ends is cancelled from outside: its caller gets a 500, and the log a
    traceback. An answer that has begun is left alone: it ends with what it is made from.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._waiting: dict[asyncio.Task[Any], asyncio.Future[None]] = {}

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
        """Let every call that has not begun to answer say that the process stops."""
        waiting, self._waiting = self._waiting, {}
        for interrupt in waiting.values():
            interrupt.set_result(None)
        if waiting:
            await asyncio.wait(waiting, timeout=_ANSWER_S)


def _stopping() -> ApiError:
    message = "the server is shutting down and waits for this no longer; what was begun may still be done"
    return ApiError(503, message, "server_error", code="shutting_down", retry_after_s=1)
