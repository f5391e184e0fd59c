"""Remote calls without their transport: futures of calls that were sent, tasks of calls that are being served."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from orchestrator.control.errors import ControlRefusedError, ControlUnavailableError
from orchestrator.control.messages import Call, CallResult, Fault

Handler = Callable[[Any], Awaitable[Any]]
"""Does one operation and returns its result, which must be encodable; raises ``ControlRefusedError`` to refuse."""

MAX_OPEN_CALLS = 256
MAX_TIMEOUT_S = 3600.0

_log = logging.getLogger(__name__)


class OpenCalls:
    """The calls that were sent and not answered yet: call id -> future. Each ends once; a late answer is refused."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._futures)

    def open(self) -> tuple[int, "asyncio.Future[Any]"]:
        """Return a fresh call id and its future.

        Raises:
            ControlUnavailableError: too many calls wait already.
        """
        if len(self._futures) >= MAX_OPEN_CALLS:
            raise ControlUnavailableError(f"{MAX_OPEN_CALLS} control calls wait for their answer already")
        self._last_id += 1
        call_id = self._last_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # However it ends, by an answer, a time-out or a cancel: an ended call leaves no entry behind.
        future.add_done_callback(lambda _: self._futures.pop(call_id, None))
        self._futures[call_id] = future
        return call_id, future

    def resolve(self, answer: CallResult) -> bool:
        """End the call this answers; False when no call waits for it."""
        future = self._futures.get(answer.call_id)
        if future is None or future.done():
            return False
        if answer.fault is None:
            future.set_result(answer.result)
        else:
            future.set_exception(ControlRefusedError(answer.fault))
        return True

    def fail_all(self, reason: str) -> None:
        """End every call with an error: no answer will come any more."""
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(ControlUnavailableError(reason))


class RpcServer:
    """Serves calls, each in a task of its own, within the caller's deadline and a bound on their number.

    handlers: by the type of the operation.
    """

    def __init__(self, handlers: Mapping[type, Handler]) -> None:
        self._handlers = handlers
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, call: Call, respond: Callable[[CallResult], None]) -> None:
        """Begin to serve one call. respond: called once with its result, on the running loop."""
        # Answered, not queued: the caller learns at once that it has to come back.
        if len(self._tasks) >= MAX_OPEN_CALLS:
            respond(_refusal(call, Fault(f"{MAX_OPEN_CALLS} control calls are being answered already")))
            return
        task = asyncio.create_task(self._serve(call, respond), name=f"control {type(call.operation).__name__}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Cancel the calls that are being served."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, call: Call, respond: Callable[[CallResult], None]) -> None:
        handler = self._handlers.get(type(call.operation))
        if handler is None:
            fault = Fault(f"nobody here does {type(call.operation).__name__}", is_callers=True)
            respond(_refusal(call, fault))
            return
        try:
            async with asyncio.timeout(_bounded(call.timeout_s)):
                result = msgspec.to_builtins(await handler(call.operation))
            respond(CallResult(call.call_id, result))
        except ControlRefusedError as error:
            respond(_refusal(call, error.fault))
        except TimeoutError:
            respond(_refusal(call, Fault(f"not done within {call.timeout_s:g} s")))
        except Exception as error:  # noqa: BLE001 - the caller gets it; the channel goes on
            _log.exception("%s failed", type(call.operation).__name__)
            respond(_refusal(call, Fault(f"{type(error).__name__}: {error}")))


def _bounded(timeout_s: float) -> float:
    # Written so that NaN, which a peer may send as well, is bounded too.
    return timeout_s if 0 <= timeout_s <= MAX_TIMEOUT_S else MAX_TIMEOUT_S


def _refusal(call: Call, fault: Fault) -> CallResult:
    return CallResult(call.call_id, fault=fault)
