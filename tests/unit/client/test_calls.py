"""Futures of calls: each ends once."""

import asyncio
from typing import Any

import pytest

from client.calls import PendingCalls, UtilityCalls
from client.engine_connection import EngineConnection
from engine.wire.errors import EngineDeadError, UtilityError
from engine.wire.ids import EngineId
from engine.wire.messages import EEP_NOTIFICATION_CALL_ID, ChannelMessage, UtilityOutput, UtilityRequest
from tests.unit.client.builders import CLIENT, RecordingSender, make_connection

E0, E1 = EngineId(0, 1), EngineId(1, 1)


class Caller:
    """Utility calls, and the requests they became."""

    def __init__(self) -> None:
        self.sender = RecordingSender()
        self.calls = UtilityCalls(CLIENT, self.sender)
        self.connections = {engine_id: make_connection(engine_id.rank) for engine_id in (E0, E1)}

    def ping(self, engine_id: EngineId) -> tuple[int, "asyncio.Future[Any]"]:
        """Call an engine; return the call id that it sees."""
        future = self.calls.call(self.connections[engine_id], "ping", [1])
        _, request = self.sender.sent[-1]
        assert isinstance(request, UtilityRequest)
        return request.call_id, future


async def test_a_call_is_known_before_anything_is_sent() -> None:
    class Answering(RecordingSender):
        """The answer is there before the call has returned."""

        def send(self, connection: EngineConnection, message: ChannelMessage) -> None:
            assert isinstance(message, UtilityRequest)
            assert message.call_id != EEP_NOTIFICATION_CALL_ID
            assert calls.resolve(connection.engine_id, UtilityOutput(message.call_id, "pong"))

    calls = UtilityCalls(CLIENT, Answering())
    assert await calls.call(make_connection(), "ping", []) == "pong"
    await asyncio.sleep(0)
    assert len(calls) == 0


async def test_a_call_carries_its_method_its_arguments_and_a_number_of_its_own() -> None:
    caller = Caller()
    (first, _), (second, _) = caller.ping(E0), caller.ping(E1)
    assert len({first, second}) == len(caller.calls) == 2
    assert caller.sender.sent == [
        (E0, UtilityRequest(CLIENT, 1, first, "ping", [1])),
        (E1, UtilityRequest(CLIENT, 1, second, "ping", [1])),
    ]
    caller.calls.fail_all("the test ends")
    await asyncio.sleep(0)


async def test_arguments_that_cannot_travel_fail_the_call_and_leave_nothing_behind() -> None:
    caller = Caller()
    with pytest.raises(TypeError):
        await caller.calls.call(make_connection(), "ping", [object()])
    await asyncio.sleep(0)
    assert len(caller.calls) == 0


async def test_an_error_names_the_method_and_the_rank() -> None:
    caller = Caller()
    call_id, future = caller.ping(E1)
    caller.calls.resolve(E1, UtilityOutput(call_id, error="ValueError: no"))
    with pytest.raises(UtilityError, match="ping failed on rank 1: ValueError: no"):
        await future


async def test_a_late_double_or_foreign_answer_finds_nobody() -> None:
    caller = Caller()
    call_id, future = caller.ping(E0)
    assert not caller.calls.resolve(E1, UtilityOutput(call_id, "from another engine"))
    assert caller.calls.resolve(E0, UtilityOutput(call_id, 1))
    assert not caller.calls.resolve(E0, UtilityOutput(call_id, 2))
    assert await future == 1
    assert not caller.calls.resolve(E0, UtilityOutput(call_id, 3))


async def test_a_caller_that_gives_up_leaves_nothing_behind() -> None:
    caller = Caller()
    call_id, future = caller.ping(E0)
    future.cancel()
    await asyncio.sleep(0)
    assert len(caller.calls) == 0
    assert not caller.calls.resolve(E0, UtilityOutput(call_id, 1))


async def test_a_death_ends_the_calls_of_that_engine_and_the_end_of_the_client_ends_all() -> None:
    caller = Caller()
    (_, dying), (_, living) = caller.ping(E0), caller.ping(E1)
    caller.calls.fail_engine(E0, "killed")
    with pytest.raises(EngineDeadError, match=r"engine 0\.1: killed"):
        await dying
    assert not living.done()
    caller.calls.fail_all("closed")
    with pytest.raises(EngineDeadError, match="closed"):
        await living


async def test_pending_calls_keep_what_a_call_is_about_until_it_ends() -> None:
    calls: PendingCalls[str] = PendingCalls()
    (first, _), (second, future) = calls.open("one"), calls.open("another")
    assert [calls.get(first), calls.get(second), calls.get(99)] == ["one", "another", None]
    assert calls.resolve(first, 1)
    assert calls.get(first) is None
    calls.fail(lambda about: ValueError(f"no answer to {about}"))
    with pytest.raises(ValueError, match="no answer to another"):
        await future
    await asyncio.sleep(0)
    assert len(calls) == 0
