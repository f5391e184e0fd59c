"""Sequences that lose their engine, or outputs of it, against engines that do what the test tells them."""

import asyncio

import pytest

from engine.wire.control import ClusterSettings
from engine.wire.errors import InvalidRequestError, OverloadedError, UtilityError
from engine.wire.ids import EngineId
from engine.wire.messages import AbortRequest, EngineCoreOutput, FinishReason
from engine.wire.replicas import ReplicaInfo, Suspect
from engine.wire.states import ReplicaState
from tests.contract.puppets import eventually, make_output, make_request, puppet_client

E0, E1 = EngineId(0, 1), EngineId(1, 1)


async def test_a_confirmed_death_moves_what_the_engine_had_once_and_silence_moves_nothing() -> None:
    async with puppet_client(2) as (client, group, (first, second)):
        requests = [make_request(client) for _ in range(4)]
        placed = {request.request_id: await client.add_request_async(request) for request in requests}
        for engine in (first, second, first, second):
            await engine.next_message()
        group.publish_group(ReplicaInfo(E0, ReplicaState.ALIVE), ReplicaInfo(E1, ReplicaState.ALIVE))
        group.publish_loads()  # nobody reports any more
        await eventually(lambda: client.snapshot_age_s() is not None)
        assert [view.num_in_flight for view in client.engine_views()] == [2, 2]
        for _ in range(3):
            group.publish_group(ReplicaInfo(E0, ReplicaState.DEAD, "exit code 9"), ReplicaInfo(E1, ReplicaState.ALIVE))
        moved = [await second.next_message()]  # one at a time: either may have killed its engine
        second.say(make_output(next(r for r in requests if r.request_id == moved[0].request_id), None, 5))
        moved.append(await second.next_message())
        assert {m.request_id for m in moved} == {i for i, engine in placed.items() if engine == E0}
        assert [m.attempt for m in moved] == [1, 1]
        assert (client.statistics()["in_flight"], client.statistics()["moves_death"]) == (4, 2)
        assert [(view.state, view.reason) for view in client.engine_views()] == [("dead", "exit code 9"), ("ready", "")]


async def test_a_seat_that_was_removed_or_refilled_unseen_is_a_death_too() -> None:
    async with puppet_client(2) as (client, group, _):
        for _ in range(2):
            await client.add_request_async(make_request(client))
        group.publish_group(ReplicaInfo(EngineId(0, 2), ReplicaState.STARTING))
        await eventually(lambda: client.statistics()["waiting_to_move"] == 2)
        reborn = group.open_engine(0, incarnation=2)
        reborn.say_ready()
        await reborn.next_message()
        assert client.statistics()["waiting_to_move"] == 1


async def test_a_draining_rank_gets_nothing_new_and_a_vacating_one_gives_up_what_it_has() -> None:
    async with puppet_client(2) as (client, group, (first, second)):
        request = make_request(client)
        await client.add_request_async(request, data_parallel_rank=0)
        await first.next_message()
        group.publish_group(ReplicaInfo(E0, ReplicaState.ALIVE, is_draining=True), ReplicaInfo(E1, ReplicaState.ALIVE))
        await eventually(lambda: client.statistics()["candidates"] == 1)
        assert client.statistics()["in_flight"] == 1
        assert (await client.add_request_async(make_request(client))) == E1
        await second.next_message()
        for _ in range(2):
            group.publish_group(
                ReplicaInfo(E0, ReplicaState.ALIVE, is_draining=True, is_migrating=True),
                ReplicaInfo(E1, ReplicaState.ALIVE),
            )
        moved = await second.next_message()
        assert (moved.request_id, moved.attempt) == (request.request_id, 1)
        assert isinstance(await first.next_message(), AbortRequest)
        group.publish_group(ReplicaInfo(E1, ReplicaState.ALIVE))
        await eventually(lambda: [view.engine_id for view in client.engine_views()] == [E1])
        assert client.statistics()["moves_planned"] == 1


@pytest.mark.parametrize(("is_dismissed", "why"), [(False, "moves_death"), (True, "moves_planned")])
async def test_a_rank_that_dies_while_it_drains_has_died_unless_it_was_let_go(is_dismissed: bool, why: str) -> None:
    async with puppet_client(2) as (client, group, (first, second)):
        await client.add_request_async(make_request(client), data_parallel_rank=0)
        await first.next_message()
        dismissed = [E0] if is_dismissed else []
        group.publish_group(
            ReplicaInfo(E0, ReplicaState.LEAVING, is_draining=True),
            ReplicaInfo(E1, ReplicaState.ALIVE),
            dismissed=dismissed,
        )
        await eventually(lambda: client.statistics()["candidates"] == 1)
        group.publish_group(
            ReplicaInfo(E0, ReplicaState.DEAD, "killed by SIGKILL"), ReplicaInfo(E1, ReplicaState.ALIVE)
        )
        await second.next_message()
        assert client.statistics()[why] == 1


async def test_last_words_move_what_the_engine_had_behind_its_last_token() -> None:
    async with puppet_client(2) as (client, _, (first, second)):
        requests = [make_request(client) for _ in range(2)]
        for request in requests:
            await client.add_request_async(request)
        call = asyncio.create_task(client.call_utility_async("ping"))
        await first.next_message()
        await second.next_message()
        await second.next_message()
        first.say(make_output(requests[0], None, 7), dead="illegal instruction")
        assert (await client.get_output_async()).outputs[0].new_token_ids == [7]
        moved = await second.next_message()
        assert (moved.request_id, moved.output_token_ids, moved.attempt) == (requests[0].request_id, [7], 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_a_stream_that_two_deaths_hit_before_a_token_ends_with_an_error_that_names_the_last() -> None:
    async with puppet_client(3) as (client, _, engines):
        request = make_request(client)
        await client.add_request_async(request)
        for engine in engines[:2]:
            await engine.next_message()
            engine.say(dead="illegal instruction")
        (end,) = (await client.get_output_async()).outputs
        assert end.finish_reason is FinishReason.ERROR
        assert "two engines in a row died" in (end.error or "")
        assert "engine 1.1: illegal instruction" in (end.error or "")
        assert client.statistics()["poison_ends"] == 1


async def test_one_that_no_engine_takes_waits_and_an_abort_ends_it_at_once() -> None:
    async with puppet_client() as (client, _, (engine,)):
        request = make_request(client)
        await client.add_request_async(request)
        engine.say(dead="illegal instruction")
        await eventually(lambda: client.statistics()["waiting_to_move"] == 1)
        with pytest.raises(OverloadedError):
            await client.add_request_async(make_request(client))
        await client.abort_requests_async([request.request_id])
        (end,) = (await client.get_output_async()).outputs
        assert (end.request_id, end.finish_reason) == (request.request_id, FinishReason.ABORT)


async def test_suspect_and_cordoned_engines_get_nothing_new_and_keep_what_they_have() -> None:
    async with puppet_client(3) as (client, group, (first, _, third)):
        kept = make_request(client)
        assert await client.add_request_async(kept) == E0
        await first.next_message()
        replicas = [ReplicaInfo(engine_id, ReplicaState.ALIVE) for engine_id in group.engines]
        suspect = Suspect(E0, False, "silent for 1.0 s")
        group.publish_group(*replicas, suspects=[suspect], settings=ClusterSettings(seq=1, cordoned=[1]))
        await eventually(lambda: client.statistics()["candidates"] == 1)
        assert [view.state for view in client.engine_views()] == ["suspect", "ready", "ready"]
        assert client.engine_views()[0].reason == "silent for 1.0 s"
        assert {await client.add_request_async(make_request(client)) for _ in range(3)} == {third.engine_id}
        with pytest.raises(OverloadedError):
            await client.add_request_async(make_request(client), data_parallel_rank=0)
        with pytest.raises(InvalidRequestError, match="valid: 0, 2"):
            await client.add_request_async(make_request(client), data_parallel_rank=1)
        first.say(make_output(kept, FinishReason.STOP))
        assert (await client.get_output_async()).outputs[0].request_id == kept.request_id
        group.publish_group(*replicas, settings=ClusterSettings(seq=2))
        await eventually(lambda: client.statistics()["candidates"] == 3)


async def test_a_planned_move_aborts_there_and_resumes_elsewhere() -> None:
    async with puppet_client(2) as (client, group, (first, second)):
        request = make_request(client)
        await client.add_request_async(request)
        await first.next_message()
        first.say(make_output(request, None, 5))
        await client.get_output_async()
        group.publish_group(ReplicaInfo(E0, ReplicaState.LEAVING), ReplicaInfo(E1, ReplicaState.ALIVE))
        await eventually(lambda: client.statistics()["candidates"] == 1)
        client.migrate_from(E0, "its rank is drained")
        client.migrate_from(EngineId(7, 1), "it is not there")
        moved = await second.next_message()
        assert (moved.attempt, moved.output_token_ids) == (1, [5])
        abort = await first.next_message()
        assert (type(abort), abort.attempt) == (AbortRequest, 0)
        assert client.statistics()["moves_planned"] == 1


async def test_a_call_whose_answer_may_have_been_lost_fails_instead_of_waiting_for_ever() -> None:
    async with puppet_client() as (client, _, (engine,)):
        call = asyncio.create_task(client.call_utility_async("ping"))
        await engine.next_message()
        engine._out_seq += 1
        engine.say()
        with pytest.raises(UtilityError, match="lost on their way"):
            await call


async def test_lost_output_frames_resume_what_they_may_have_spoken_of_and_nothing_else() -> None:
    async with puppet_client() as (client, _, (engine,)):
        lost, untouched = make_request(client), make_request(client)
        await client.add_request_async(lost)
        await engine.next_message()
        await client.add_request_async(untouched)
        await engine.next_message()
        engine.say(make_output(lost, None, 5), applied=1)
        engine._out_seq += 1
        engine.say(make_output(lost, FinishReason.STOP, at=2), applied=1)

        assert [output.new_token_ids for output in (await client.get_output_async()).outputs] == [[5]]
        abort = await engine.next_message()
        assert (type(abort), abort.request_id, abort.attempt) == (AbortRequest, lost.request_id, 0)
        resumed = await engine.next_message()
        assert (resumed.request_id, resumed.attempt, resumed.output_token_ids) == (lost.request_id, 1, [5])

        engine.say(make_output(untouched, FinishReason.STOP), make_output(lost, FinishReason.STOP, 6, at=1))
        outputs = (await client.get_output_async()).outputs
        assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs] == [
            (untouched.request_id, [], FinishReason.STOP),
            (lost.request_id, [6], FinishReason.STOP),
        ]
        statistics = client.statistics()
        assert (statistics["in_flight"], statistics["moves_gap"], statistics["unexpected_outputs"]) == (0, 1, 1)


@pytest.mark.parametrize("token_between", [False, True])
async def test_two_deaths_that_hit_the_same_stream_before_or_after_its_first_new_token(token_between: bool) -> None:
    async with puppet_client(3) as (client, _, (first, second, third)):
        request = make_request(client)
        await client.add_request_async(request)
        await first.next_message()
        first.say(make_output(request, None, 5), dead="killed")
        resumed = await second.next_message()
        assert resumed.output_token_ids == [5]
        if token_between:
            second.say(make_output(request, None, 6, at=1))
        second.say(dead="killed too")
        resumed = await third.next_message()
        assert resumed.output_token_ids == ([5, 6] if token_between else [5])
        rest = [7] if token_between else [6, 7]
        third.say(make_output(request, FinishReason.LENGTH, *rest, at=len(resumed.output_token_ids)))
        outputs: list[EngineCoreOutput] = []
        while not outputs or outputs[-1].finish_reason is None:
            outputs += (await client.get_output_async()).outputs
        assert [token for output in outputs for token in output.new_token_ids] == [5, 6, 7]
        assert client.statistics()["moves_death"] == 2
