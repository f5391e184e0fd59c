"""The client without sockets, over real sim engines in threads."""

import asyncio
import gc
import threading
import weakref

import pytest

from client.core_thread import Core
from client.inproc_client import InprocClient
from client.sync_mp_client import MAX_UNREAD_BATCHES
from engine.wire.errors import EngineDeadError, InvalidRequestError, StartupError, UtilityError
from engine.wire.ids import EngineId
from engine.wire.messages import EngineCoreOutput, EngineReady, FinishReason
from tests.contract.deployment import eventually, finish, make_request
from tests.unit.client.inproc import CRASH, FAIL, inproc_client, sim_ranks


def engine_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("engine "))


async def test_a_request_comes_back_whole_and_ends_once() -> None:
    async with inproc_client() as client:
        request = make_request(client, max_tokens=5)
        assert await client.add_request_async(request) == EngineId(0, 1)
        outputs = (await finish(client, request))[request.request_id]
    assert sum(len(output.new_token_ids) for output in outputs) == 5
    assert [o.finish_reason for o in outputs if o.finish_reason is not None] == [FinishReason.LENGTH]


async def test_picks_go_to_the_engine_with_less_in_flight() -> None:
    async with inproc_client(2, step_s=0.005) as client:
        requests = [make_request(client, max_tokens=4) for _ in range(10)]
        picks = [await client.add_request_async(request) for request in requests]
        pinned, extra = make_request(client, max_tokens=4), make_request(client)
        assert await client.add_request_async(pinned, data_parallel_rank=1) == EngineId(1, 1)
        assert await client.add_request_async(extra) == EngineId(0, 1)
        with pytest.raises(InvalidRequestError, match="valid: 0, 1"):
            await client.add_request_async(make_request(client), data_parallel_rank=2)
        await finish(client, *requests, pinned, extra)
        assert [view.num_in_flight for view in client.engine_views()] == [0, 0]
    assert sorted(picks) == [EngineId(0, 1)] * 5 + [EngineId(1, 1)] * 5


async def test_an_abort_ends_all_samples_or_the_one_named() -> None:
    async with inproc_client() as client:
        first = make_request(client, max_tokens=5_000)
        second = make_request(client, sample_index=1, max_tokens=5_000)
        second.request_id = first.request_id
        await client.add_request_async(first)
        await client.add_request_async(second)
        await client.abort_requests_async([first.request_id], sample_index=1)
        ends: list[EngineCoreOutput] = []
        while not ends:
            ends = [o for o in (await client.get_output_async()).outputs if o.finish_reason is not None]
        assert [(o.sample_index, o.finish_reason) for o in ends] == [(1, FinishReason.ABORT)]
        await client.abort_requests_async([first.request_id, 12345])
        outputs = (await finish(client, first))[first.request_id]
    assert outputs[-1].finish_reason is FinishReason.ABORT


async def test_a_request_that_fails_leaves_the_others_alone() -> None:
    async with inproc_client() as client:
        good, bad = make_request(client), make_request(client, bytes([FAIL]))
        await client.add_request_async(good)
        await client.add_request_async(bad)
        outputs = await finish(client, good, bad)
    assert outputs[good.request_id][-1].finish_reason is FinishReason.LENGTH
    assert outputs[bad.request_id][-1].finish_reason is FinishReason.ERROR


async def test_what_a_core_that_raises_had_goes_on_on_the_others_and_the_killer_is_tried_once_more() -> None:
    async with inproc_client(3) as client:
        requests = [make_request(client, max_tokens=40) for _ in range(6)]
        for index, request in enumerate(requests):
            await client.add_request_async(request, data_parallel_rank=index % 3)
        killer = make_request(client, bytes([CRASH]))
        await client.add_request_async(killer, data_parallel_rank=0)
        outputs = await finish(client, *requests, killer)
        for request in requests:
            said = outputs[request.request_id]
            assert [o.finish_reason for o in said if o.finish_reason is not None] == [FinishReason.LENGTH]
            tokens = [token for o in said for token in o.new_token_ids]
            assert tokens == [token for o in outputs[requests[2].request_id] for token in o.new_token_ids]
        (end,) = outputs[killer.request_id]
        assert end.finish_reason is FinishReason.ERROR
        assert "two engines in a row died" in str(end.error)
        assert "SimulatedCrashError" in str(end.error)
        assert sorted(view.state for view in client.engine_views()) == ["dead", "dead", "ready"]
        (survivor,) = [view.engine_id for view in client.engine_views() if view.state == "ready"]
        assert await client.call_utility_async("echo", 1) == {survivor.rank: 1}
        after = make_request(client)
        assert await client.add_request_async(after) == survivor


async def test_when_no_engine_is_left_every_call_says_so_after_the_last_outputs() -> None:
    async with inproc_client() as client:
        killer = make_request(client, bytes([CRASH]))
        await client.add_request_async(killer)
        outputs = await finish(client, killer)
        assert outputs[killer.request_id][-1].finish_reason is FinishReason.ERROR
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="no engine is left"):
                await client.get_output_async()
        with pytest.raises(EngineDeadError):
            await client.add_request_async(make_request(client))
        with pytest.raises(EngineDeadError):
            await client.call_utility_async("echo", 1)


async def test_utility_calls_go_to_every_rank_and_failures_name_theirs() -> None:
    async with inproc_client(2) as client:
        assert await client.call_utility_async("echo", {"a": 1}) == {0: {"a": 1}, 1: {"a": 1}}
        with pytest.raises(UtilityError, match="no utility method 'nothing'") as caught:
            await client.call_utility_async("nothing")
        assert sorted(caught.value.failures) == [0, 1]
        with pytest.raises(UtilityError, match="rank 0"):
            await client.call_utility_async("echo", object())
        assert client.statistics()["utility_calls"] == 0


async def test_outputs_that_nobody_takes_hold_the_engine_back() -> None:
    async with inproc_client(step_s=0.0) as client:
        request = make_request(client, max_tokens=3 * MAX_UNREAD_BATCHES)
        await client.add_request_async(request)
        await eventually(lambda: client.statistics()["queued_outputs"] == MAX_UNREAD_BATCHES)
        outputs = (await finish(client, request))[request.request_id]
    assert sum(len(output.new_token_ids) for output in outputs) == 3 * MAX_UNREAD_BATCHES


async def test_closing_twice_ends_the_threads_and_whoever_waits() -> None:
    client = InprocClient(sim_ranks(), 2)
    request = make_request(client, max_tokens=5_000)
    await client.add_request_async(request)
    await client.get_output_async()
    waiting = asyncio.create_task(client.call_utility_async("echo", 1))
    await asyncio.sleep(0)
    await client.aclose()
    await client.aclose()
    assert engine_threads() == []
    with pytest.raises(UtilityError, match="the client was closed"):
        await waiting
    for _ in range(client.statistics()["queued_outputs"]):
        await client.get_output_async()
    with pytest.raises(EngineDeadError, match="the client was closed"):
        await client.get_output_async()


async def test_closing_frees_an_engine_that_waits_for_its_reader() -> None:
    client = InprocClient(sim_ranks(step_s=0.0))
    await client.add_request_async(make_request(client, max_tokens=5_000))
    await eventually(lambda: client.statistics()["queued_outputs"] == MAX_UNREAD_BATCHES)
    await client.aclose()
    assert engine_threads() == []


async def test_a_client_that_is_dropped_takes_its_threads_with_it() -> None:
    client = InprocClient(sim_ranks(), 2)
    await client.add_request_async(make_request(client, max_tokens=5_000))
    await client.get_output_async()
    dropped = weakref.ref(client)
    del client
    gc.collect()
    assert dropped() is None
    assert engine_threads() == []


async def test_a_load_that_fails_closes_the_engines_loaded_before() -> None:
    load = sim_ranks()

    def load_one(engine_id: EngineId) -> tuple[EngineReady, Core]:
        if engine_id.rank == 1:
            raise StartupError("no room for a second one")
        return load(engine_id)

    with pytest.raises(StartupError, match="no room"):
        InprocClient(load_one, 2)
    gc.collect()
    assert engine_threads() == []


async def test_threads_stand_still_without_work() -> None:
    async with inproc_client() as client:
        request = make_request(client)
        await client.add_request_async(request)
        await finish(client, request)
        steps = (await client.call_utility_async("get_load"))[0]["num_steps"]
        assert (await client.call_utility_async("get_load"))[0]["num_steps"] == steps
