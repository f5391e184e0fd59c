"""Utility calls that wait for their answer."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from engine.wire.errors import EngineDeadError, UtilityError, UtilityErrorCode
from engine.wire.ids import EngineId
from engine.wire.messages import UtilityOutput


class _Call(NamedTuple):
    engine_id: EngineId
    method: str
    future: asyncio.Future[Any]


class UtilityCalls:
    """Futures by call id; each ends once: by its answer, its engine's death, the end of the line, or its caller."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, engine_id: EngineId, method: str) -> tuple[int, asyncio.Future[Any]]:
        """Return a fresh call id (1, 2, ...) and its future, registered before anything is sent."""
        self._last_id += 1
        call_id = self._last_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # A caller that gives up cancels the future; the entry goes with it and the late answer finds nothing.
        future.add_done_callback(lambda _: self._calls.pop(call_id, None))
        self._calls[call_id] = _Call(engine_id, method, future)
        return call_id, future

    def ask(self, engine_id: EngineId, method: str, send: Callable[[int], object]) -> "asyncio.Future[Any]":
        """Open a call and let ``send``, given its id, put it on the line; return what to await.

        Synchronous, so that no death or end comes between the look at a line and the call on it: nobody would end a
        call that was opened after.
        """
        call_id, future = self.open(engine_id, method)
        try:
            send(call_id)
        except TypeError as error:  # arguments that cannot travel
            future.set_exception(error)
        return future

    def resolve(self, engine_id: EngineId, output: UtilityOutput) -> bool:
        """End the call this output answers; False when nobody waits for it, or for another engine's answer."""
        call = self._calls.get(output.call_id)
        if call is None or call.engine_id != engine_id or call.future.done():
            return False
        if output.error is None:
            call.future.set_result(output.result)
        else:
            rank = engine_id.rank
            failed = UtilityError(call.method, {rank: output.error}, {}, {rank: output.error_code})
            call.future.set_exception(failed)
        return True

    def fail_engine(self, engine_id: EngineId, reason: str) -> None:
        """End the calls that wait for an engine that is gone."""
        self._fail([call for call in self._calls.values() if call.engine_id == engine_id], reason)

    def fail_all(self, reason: str) -> None:
        """End every call; nothing more will come."""
        self._fail(list(self._calls.values()), reason)

    def _fail(self, calls: list[_Call], reason: str) -> None:
        for call in calls:
            if not call.future.done():
                call.future.set_exception(EngineDeadError(reason, call.engine_id))


async def gather_ranks(
    method: str, calls: "Mapping[int, asyncio.Future[Any]]", timeout_s: float | None = None
) -> dict[int, Any]:
    """Wait for one call per rank; return rank -> result.

    timeout_s: a rank that has not answered by then has failed; None waits for its answer or its death.

    Raises:
        UtilityError: it failed on some ranks; holds their reasons and the others' results.
    """
    try:
        if calls:
            await asyncio.wait(calls.values(), timeout=timeout_s)
    finally:
        late = {rank for rank, call in calls.items() if call.cancel()}
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    codes: dict[int, UtilityErrorCode] = {}
    for rank, call in calls.items():
        if rank in late:
            failures[rank], codes[rank] = f"no answer within {timeout_s:g} s", UtilityErrorCode.NO_ANSWER
        elif (error := call.exception()) is None:
            results[rank] = call.result()
        else:
            failures[rank], codes[rank] = _reason(error, rank)
    if failures:
        raise UtilityError(method, failures, results, codes)
    return results


def _reason(error: BaseException, rank: int) -> tuple[str, UtilityErrorCode]:
    """Return why a rank's call failed, for people and for programs."""
    if isinstance(error, UtilityError):
        return error.failures[rank], error.codes[rank]
    code = UtilityErrorCode.ENGINE_DEAD if isinstance(error, EngineDeadError) else UtilityErrorCode.FAILED
    return str(error) or repr(error), code
