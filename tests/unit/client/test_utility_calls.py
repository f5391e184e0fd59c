"""Futures of utility calls: each ends once."""

import asyncio

import pytest

from client.utility_calls import UtilityCalls, gather_ranks
from engine.wire.errors import EngineDeadError, UtilityError, UtilityErrorCode
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


async def test_each_rank_that_failed_has_a_code_of_its_own() -> None:
    calls = UtilityCalls()
    futures: dict[int, asyncio.Future[object]] = {}
    for rank in range(5):
        call_id, futures[rank] = calls.open(EngineId(rank, 1), "ping")
        if rank == 1:
            calls.resolve(
                EngineId(1, 1), UtilityOutput(call_id, error="none", error_code=UtilityErrorCode.UNKNOWN_METHOD)
            )
        elif rank == 2:
            calls.resolve(EngineId(2, 1), UtilityOutput(call_id, error="ValueError: no answer within 1 s"))
        elif rank == 4:
            calls.resolve(EngineId(4, 1), UtilityOutput(call_id, "pong"))
    calls.fail_engine(EngineId(3, 1), "killed")
    with pytest.raises(UtilityError) as caught:
        await gather_ranks("ping", futures, timeout_s=0.0)
    assert caught.value.codes == {
        0: UtilityErrorCode.NO_ANSWER,
        1: UtilityErrorCode.UNKNOWN_METHOD,
        2: UtilityErrorCode.FAILED,
        3: UtilityErrorCode.ENGINE_DEAD,
    }
    assert caught.value.results == {4: "pong"}
