"""Futures of utility calls: each ends once."""

import asyncio

import pytest

from client.utility_calls import UtilityCalls
from engine.wire.errors import EngineDeadError, UtilityError
from engine.wire.ids import EngineId
from engine.wire.messages import EEP_NOTIFICATION_CALL_ID, UtilityOutput

E0, E1 = EngineId(0, 1), EngineId(1, 1)


async def test_a_call_is_known_before_anything_is_sent() -> None:
    calls = UtilityCalls()
    call_id, future = calls.open(E0, "ping")
    assert call_id != EEP_NOTIFICATION_CALL_ID
    assert calls.resolve(E0, UtilityOutput(call_id, "pong"))
    assert await future == "pong"
    await asyncio.sleep(0)
    assert len(calls) == 0


async def test_an_error_names_the_method_and_the_rank() -> None:
    calls = UtilityCalls()
    call_id, future = calls.open(E1, "ping")
    calls.resolve(E1, UtilityOutput(call_id, error="ValueError: no"))
    with pytest.raises(UtilityError, match="ping failed on rank 1: ValueError: no"):
        await future


async def test_a_late_double_or_foreign_answer_finds_nobody() -> None:
    calls = UtilityCalls()
    call_id, future = calls.open(E0, "ping")
    assert not calls.resolve(E1, UtilityOutput(call_id, "from another engine"))
    assert calls.resolve(E0, UtilityOutput(call_id, 1))
    assert not calls.resolve(E0, UtilityOutput(call_id, 2))
    assert await future == 1
    assert not calls.resolve(E0, UtilityOutput(call_id, 3))


async def test_a_caller_that_gives_up_leaves_nothing_behind() -> None:
    calls = UtilityCalls()
    call_id, future = calls.open(E0, "ping")
    future.cancel()
    await asyncio.sleep(0)
    assert len(calls) == 0
    assert not calls.resolve(E0, UtilityOutput(call_id, 1))


async def test_a_death_ends_the_calls_of_that_engine_and_the_end_of_the_line_ends_all() -> None:
    calls = UtilityCalls()
    (_, dying), (_, living) = calls.open(E0, "ping"), calls.open(E1, "ping")
    calls.fail_engine(E0, "killed")
    with pytest.raises(EngineDeadError, match=r"engine 0\.1: killed"):
        await dying
    assert not living.done()
    calls.fail_all("closed")
    with pytest.raises(EngineDeadError, match="closed"):
        await living
