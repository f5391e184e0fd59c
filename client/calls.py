"""Calls that wait for their answer: futures by call id, utility calls of engines, and the results of several ranks."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from client.engine_connection import EngineConnection, Sender
from engine.wire.errors import EngineDeadError, UtilityError, UtilityErrorCode
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import UtilityOutput, UtilityRequest

C = TypeVar("C")


class PendingCalls(Generic[C]):
    """Futures by call id; each ends once: by ``resolve``, ``fail`` or its caller, who gives up by cancelling it.

    C: what is kept of a call beside its future, for example whom it asks. Made and used on one event loop.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[C, asyncio.Future[Any]]] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, about: C) -> tuple[int, "asyncio.Future[Any]"]:
        """Return a fresh call id (1, 2, ...) and its future, registered before anything is sent."""
        self._last_id += 1
        call_id = self._last_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Whichever way the future ends, the entry goes with it: a late or second answer finds nothing.
        future.add_done_callback(lambda _: self._calls.pop(call_id, None))
        self._calls[call_id] = about, future
        return call_id, future

    def get(self, call_id: int) -> C | None:
        """Return what is kept of a call that waits, or None when none of this id does."""
        about, future = self._calls.get(call_id, (None, None))
        return None if future is None or future.done() else about

    def resolve(self, call_id: int, result: Any = None, error: Exception | None = None) -> bool:
        """End a call by its answer: a result, or an error to raise; False when nobody waits for it."""
        _, future = self._calls.get(call_id, (None, None))
        if future is None or future.done():  # done, and its callback has not run yet
            return False
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        return True

    def fail(self, error_of: Callable[[C], Exception], among: Callable[[C], bool] = lambda _: True) -> None:
        """End the calls whose answer will not come.

        error_of: what is raised in the caller of a call. among: which calls; default: all.
        """
        for about, future in list(self._calls.values()):
            if among(about) and not future.done():
                future.set_exception(error_of(about))


class _Callee(NamedTuple):
    engine_id: EngineId
    method: str


class UtilityCalls:
    """The utility calls of one client. Each ends once: by its answer, its engine's end, the client's, or its caller."""

    def __init__(self, client_id: ClientId, sender: Sender) -> None:
        self._client_id = client_id
        self._sender = sender
        self._pending: PendingCalls[_Callee] = PendingCalls()

    def __len__(self) -> int:
        return len(self._pending)

    def call(self, connection: EngineConnection, method: str, args: Sequence[Any]) -> "asyncio.Future[Any]":
        """Call a method of one engine; return what to await: its result, ``UtilityError`` or ``EngineDeadError``.

        Synchronous, so that no death or end comes between the look at a connection and the call on it: nobody would
        end a call that was opened after.
        """
        call_id, future = self._pending.open(_Callee(connection.engine_id, method))
        try:
            self._sender.send(connection, UtilityRequest(self._client_id, 0, call_id, method, list(args)))
        except TypeError as error:  # arguments that cannot travel
            future.set_exception(error)
        return future

    async def call_ranks(
        self,
        connections: Mapping[EngineId, EngineConnection],
        method: str,
        args: Sequence[Any],
        timeout_s: float | None = None,
    ) -> dict[int, Any]:
        """Call a method of each of these engines; return rank -> result, in the order of the ranks.

        timeout_s: a rank that has not answered by then has failed; None waits for its answer or its death.

        Raises:
            UtilityError: it failed on some ranks; holds their reasons and codes, and the others' results.
            EngineDeadError: no engine is there.
        """
        if not connections:
            raise EngineDeadError("no engine is there to call")
        calls = {engine_id.rank: self.call(connections[engine_id], method, args) for engine_id in sorted(connections)}
        return await _gather(method, calls, timeout_s)

    def resolve(self, engine_id: EngineId, output: UtilityOutput) -> bool:
        """End the call this output answers; False when nobody waits for it, or for another engine's answer."""
        callee = self._pending.get(output.call_id)
        if callee is None or callee.engine_id != engine_id:
            return False
        if output.error is None:
            return self._pending.resolve(output.call_id, output.result)
        rank = engine_id.rank
        error = UtilityError(callee.method, {rank: output.error}, {}, {rank: output.error_code})
        return self._pending.resolve(output.call_id, error=error)

    def fail_engine(self, engine_id: EngineId, reason: str) -> None:
        """End the calls that wait for an engine whose answer will not come."""
        self._pending.fail(lambda callee: EngineDeadError(reason, callee.engine_id), lambda c: c.engine_id == engine_id)

    def fail_all(self, reason: str) -> None:
        """End every call; nothing more will come."""
        self._pending.fail(lambda callee: EngineDeadError(reason, callee.engine_id))


async def _gather(
    method: str, calls: "Mapping[int, asyncio.Future[Any]]", timeout_s: float | None = None
) -> dict[int, Any]:
    """Wait for one call per rank; return rank -> result. Raises ``UtilityError``: see ``UtilityCalls.call_ranks``."""
    try:
        if calls:
            await asyncio.wait(calls.values(), timeout=timeout_s)
    finally:
        late = {rank for rank, call in calls.items() if call.cancel()}  # also when the caller itself is cancelled
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
