"""Requests, aborts, utility calls and what the state channel says, against engines that do what the test tells them."""

import asyncio
import time
from typing import Any

import pytest
from msgspec.structs import replace

from client.dplb_async_mp_client import DPLBAsyncMPClient
from client.engine_connection import RESEND_AFTER_S
from client.state_follower import SNAPSHOT_STALE_S
from engine.wire.control import Membership, MemberStatus
from engine.wire.errors import EngineDeadError, InvalidRequestError, OverloadedError, UtilityError
from engine.wire.ids import EngineId
from engine.wire.messages import (
    EEP_NOTIFICATION_CALL_ID,
    AbortRequest,
    AddRequest,
    ClientInfo,
    FinishReason,
    UtilityOutput,
    UtilityRequest,
)
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EnginePhase, ReplicaState
from tests.contract.puppets import (
    DEADLINE_S,
    PuppetEngine,
    Puppets,
    eventually,
    ledger_loads,
    make_output,
    make_request,
    puppet_client,
    puppets,
)

E0, E1 = EngineId(0, 1), EngineId(1, 1)


async def test_an_add_carries_who_sent_it_and_its_number_on_the_line() -> None:
    async with puppet_client() as (client, _, (engine,)):
        requests = [make_request(client) for _ in range(3)]
        for request in requests:
            await client.add_request_async(request)
        received = [await engine.next_message() for _ in requests]
        assert [m.channel_seq for m in received] == [1, 2, 3]
        assert [(m.client_id, m.request_id) for m in received] == [(client.client_id, r.request_id) for r in requests]


async def test_aborts_and_utility_calls_are_numbered_on_the_same_line() -> None:
    async with puppet_client() as (client, _, (engine,)):
        request = make_request(client)
        await client.add_request_async(request)
        call = asyncio.create_task(client.call_utility_async("ping", 1))
        await engine.next_message()
        await engine.next_message()
        await client.abort_requests_async([request.request_id])
        await engine.next_message()
        assert [(type(m), m.channel_seq) for m in engine.received] == [
            (AddRequest, 1),
            (UtilityRequest, 2),
            (AbortRequest, 3),
        ]
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert client.statistics()["utility_calls"] == 0


async def test_an_abort_is_kept_and_repeated_in_order_until_the_engine_has_applied_it() -> None:
    async with puppet_client() as (client, _, (engine,)):
        request = make_request(client)
        await client.add_request_async(request)
        await client.abort_requests_async([request.request_id])
        for _ in range(2):
            await engine.next_message()
        engine.say(applied=1)  # the abort was lost on the way
        again: AbortRequest = await engine.next_message()
        assert isinstance(again, AbortRequest)
        assert (again.channel_seq, again.request_id) == (2, request.request_id)
        engine.say(make_output(request, FinishReason.ABORT), applied=2)
        await client.get_output_async()
        assert client.statistics()["unapplied_messages"] == 0
        client._on_heartbeat(time.monotonic() + 10 * RESEND_AFTER_S)
        assert client.statistics()["resent_messages"] == 1


async def test_a_snapshot_too_proves_delivery() -> None:
    async with puppet_client() as (client, group, (engine,)):
        await client.add_request_async(make_request(client))
        assert client.statistics()["unapplied_messages"] == 1
        group.publish_loads(group.engine_report(engine.engine_id, 1, applied=1, num_running=1))
        await eventually(lambda: client.statistics()["unapplied_messages"] == 0)


async def test_an_engine_whose_connection_is_gone_leaves_the_candidates_and_another_is_picked() -> None:
    async with puppet_client(2) as (client, _, (first, second)):
        first.close()
        async with asyncio.timeout(DEADLINE_S):
            while "sends_not_connected" not in client.statistics():  # the peer's end is noticed a little later
                await client.add_request_async(make_request(client))
                await asyncio.sleep(0)
        assert {await client.add_request_async(make_request(client)) for _ in range(6)} == {second.engine_id}
        in_flight = [view.num_in_flight for view in client.engine_views()]
        assert client.statistics()["in_flight"] == sum(in_flight)


async def test_when_no_engine_is_there_the_request_is_refused_with_a_hint_to_retry() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        with pytest.raises(OverloadedError) as caught:
            await client.add_request_async(make_request(client))
        assert caught.value.retry_after_s > 0
        await client.aclose()


async def test_an_explicit_rank_that_is_not_there_names_those_that_are() -> None:
    async with puppet_client(2) as (client, _, _):
        with pytest.raises(InvalidRequestError, match="valid: 0, 1") as caught:
            await client.add_request_async(make_request(client), data_parallel_rank=2)
        assert caught.value.field == "data_parallel_rank"
        assert await client.add_request_async(make_request(client), data_parallel_rank=1) == E1


async def test_the_least_loaded_engine_by_the_snapshot_is_picked() -> None:
    async with puppet_client(2) as (client, group, _):
        group.publish_loads(
            group.engine_report(E0, 1, applied=0, num_running=3), group.engine_report(E1, 1, applied=0, num_waiting=1)
        )
        await eventually(lambda: ledger_loads(client) == [3, 4])
        assert await client.add_request_async(make_request(client)) == E0
        assert ledger_loads(client) == [4, 4]


async def test_own_unseen_requests_count_once_per_live_client() -> None:
    async with puppet_client(2) as (client, group, _):
        other = ClientInfo(client.client_id.__class__(1, 1), "ipc://x", "ipc://y")
        group.publish_group(clients=[group.info, other])
        group.publish_loads(*(group.engine_report(engine_id, 1, applied=0) for engine_id in (E0, E1)))
        await eventually(lambda: client.num_clients == 2 and client.snapshot_age_s() is not None)
        await client.add_request_async(make_request(client))
        assert ledger_loads(client) == [2, 0]


async def test_when_snapshots_stop_the_clients_own_counts_are_all_it_believes() -> None:
    async with puppet_client(2) as (client, group, _):
        group.publish_loads(*(group.engine_report(engine, 1, applied=0, num_running=9) for engine in (E0, E1)))
        await eventually(lambda: ledger_loads(client) == [9, 9])
        client._on_heartbeat(time.monotonic() + SNAPSHOT_STALE_S / 2)
        assert ledger_loads(client) == [9, 9]
        client._on_heartbeat(time.monotonic() + SNAPSHOT_STALE_S + 1)
        await client.add_request_async(make_request(client))
        assert ledger_loads(client) == [1, 0]


async def test_leaving_and_dismissed_engines_get_nothing_new_but_finish_what_they_have() -> None:
    async with puppet_client(2) as (client, group, (first, _)):
        request = make_request(client)
        assert await client.add_request_async(request) == E0
        group.publish_group(ReplicaInfo(E0, ReplicaState.LEAVING), ReplicaInfo(E1, ReplicaState.ALIVE))
        await eventually(lambda: client.statistics()["candidates"] == 1)
        assert {await client.add_request_async(make_request(client)) for _ in range(4)} == {E1}
        assert [view.state for view in client.engine_views()] == ["leaving", "ready"]
        await first.next_message()
        first.say(make_output(request, FinishReason.LENGTH))
        assert (await client.get_output_async()).outputs[0].finish_reason is FinishReason.LENGTH
        group.publish_group(dismissed=[E1])
        await eventually(lambda: [view.state for view in client.engine_views()] == ["ready", "leaving"])
        assert await client.add_request_async(make_request(client)) == E0


async def test_a_rerouted_request_is_answered_once_by_another_engine() -> None:
    async with puppet_client(2) as (client, _, (first, second)):
        request = make_request(client)
        assert await client.add_request_async(request) == E0
        await first.next_message()
        first.say(make_output(request, FinishReason.REROUTE))
        moved = await second.next_message()
        assert (moved.request_id, moved.attempt) == (request.request_id, 1)
        second.say(make_output(request, FinishReason.STOP, 4))
        (end,) = (await client.get_output_async()).outputs
        assert (end.new_token_ids, end.finish_reason) == ([4], FinishReason.STOP)
        assert client.statistics()["in_flight"] == 0


async def test_a_lower_generation_and_an_old_number_are_not_believed() -> None:
    async with puppet_client(1) as (client, group, _):
        group.publish_group(ReplicaInfo(E0, ReplicaState.LEAVING), generation=2, seq=5)
        await eventually(lambda: client.statistics()["candidates"] == 0)
        group.publish_group(ReplicaInfo(E0, ReplicaState.ALIVE), generation=1, seq=900)
        group.publish_group(ReplicaInfo(E0, ReplicaState.ALIVE), generation=2, seq=4)
        group.publish_loads(generation=2)
        await eventually(lambda: client.snapshot_age_s() is not None)
        assert client.statistics()["candidates"] == 0
        group.publish_group(ReplicaInfo(E0, ReplicaState.ALIVE), generation=3, seq=1)
        await eventually(lambda: client.statistics()["candidates"] == 1)


async def test_missing_output_frames_are_counted() -> None:
    async with puppet_client() as (client, _, (engine,)):
        engine.say()
        engine._out_seq += 3
        engine.say()
        await eventually(lambda: client.statistics().get("output_gaps") == 3)


# --- utility calls and notifications ---


async def _answer(engine: PuppetEngine, **answer: Any) -> UtilityRequest:
    call: UtilityRequest = await engine.next_message()
    engine.say(utility=UtilityOutput(call.call_id, **answer))
    return call


async def test_a_fan_out_call_returns_one_result_per_rank() -> None:
    async with puppet_client(3) as (client, _, engines):
        call = asyncio.create_task(client.call_utility_async("double", 21))
        requests = await asyncio.gather(*(_answer(engine, result=engine.engine_id.rank * 10) for engine in engines))
        assert await call == {0: 0, 1: 10, 2: 20}
        assert {(request.method, tuple(request.args)) for request in requests} == {("double", (21,))}


async def test_a_fan_out_call_that_fails_on_one_rank_lists_it_and_the_others_results() -> None:
    async with puppet_client(3) as (client, _, engines):
        call = asyncio.create_task(client.call_utility_async("sleep"))
        await _answer(engines[0], result="ok")
        await _answer(engines[1], error="ValueError: no")
        await engines[2].next_message()
        engines[2].say(dead="killed")
        with pytest.raises(UtilityError, match="sleep failed on rank 1: ValueError: no, rank 2: ") as caught:
            await call
        assert caught.value.results == {0: "ok"}
        assert set(caught.value.failures) == {1, 2}


async def test_a_collective_rpc_returns_results_in_the_order_of_the_ranks() -> None:
    async with puppet_client(2) as (client, _, (first, second)):
        call = asyncio.create_task(client.collective_rpc_async("load", 3.0, (1,), {"k": 2}))
        request = await _answer(second, result="b")
        await _answer(first, result="a")
        assert await call == ["a", "b"]
        assert (request.method, request.args) == ("collective_rpc", ["load", 3.0, [1], {"k": 2}])


async def test_an_answer_is_believed_only_from_the_engine_that_was_asked() -> None:
    async with puppet_client(2) as (client, _, (first, second)):
        call = asyncio.create_task(client.call_utility_async("who"))
        ask_first, ask_second = await first.next_message(), await second.next_message()
        second.say(utility=UtilityOutput(ask_first.call_id, "forged"))
        second.say(utility=UtilityOutput(ask_second.call_id, "second"))
        first.say(utility=UtilityOutput(ask_first.call_id, "first"))
        first.say(utility=UtilityOutput(999, "nobody asked"))
        assert await call == {0: "first", 1: "second"}
        await eventually(lambda: client.statistics().get("unexpected_utility_outputs") == 2)


async def test_a_call_with_nobody_to_answer_fails_at_once() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        with pytest.raises(EngineDeadError):
            await client.call_utility_async("ping")
        await client.aclose()


async def test_notifications_run_in_their_own_task_and_answer_no_call() -> None:
    class Watching(DPLBAsyncMPClient):
        async def eep_process_engine_core_notification(self, engine_id: EngineId, notification: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            names.append(task.get_name())
            await release.wait()
            await super().eep_process_engine_core_notification(engine_id, notification)

    names: list[str] = []
    release = asyncio.Event()
    async with puppets() as group:
        client = Watching(group.config)
        (engine,) = await group.join(client)
        call = asyncio.create_task(client.call_utility_async("ping"))
        request = await engine.next_message()
        engine.say(utility=UtilityOutput(EEP_NOTIFICATION_CALL_ID, "RECONFIGURE_FINISHED"))
        engine.say(utility=UtilityOutput(request.call_id, "pong"))
        assert await call == {0: "pong"}  # though the notification's task still waits
        assert len(names) == 1
        assert "notification" in names[0]
        release.set()
        await eventually(lambda: client.eep_scaling_cache == {E0: "RECONFIGURE_FINISHED"})
        await client.aclose()


async def test_a_notification_handler_that_fails_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(DPLBAsyncMPClient):
        async def eep_process_engine_core_notification(self, engine_id: EngineId, notification: Any) -> None:
            raise ValueError("cannot handle it")

    async with puppets() as group:
        client = Failing(group.config)
        (engine,) = await group.join(client)
        engine.say(utility=UtilityOutput(EEP_NOTIFICATION_CALL_ID, "SHUTDOWN_COMPLETE"))
        await eventually(lambda: any("notification" in record.message for record in caplog.records))
        await _serves_one(client, group, engine)
        await client.aclose()


async def _serves_one(client: DPLBAsyncMPClient, group: Puppets, engine: PuppetEngine) -> None:
    request = make_request(client)
    await client.add_request_async(request)
    await engine.next_message()
    engine.say(make_output(request, FinishReason.STOP))
    assert (await client.get_output_async()).outputs[0].request_id == request.request_id


async def test_a_request_to_an_idle_lockstep_group_wishes_for_the_next_wave_once() -> None:
    async with puppet_client(2) as (client, group, _):
        members = Membership(1, [E0, E1], [[0], [1]], "here:1")
        status = MemberStatus(2, "here:1", members)
        group.publish_group(committed=members, wave_started=4)
        idle = [
            replace(group.engine_report(e, 1, applied=0), phase=EnginePhase.IDLE, wave=4, has_work=False, member=status)
            for e in (E0, E1)
        ]
        group.publish_loads(*idle)
        await eventually(lambda: client.current_wave == 4 and client.snapshot_age_s() is not None)
        await client.add_request_async(make_request(client))
        await client.add_request_async(make_request(client))
        wishes = [0]
        while not wishes[-1]:
            wishes.append((await group.next_report()).wave_wanted)
        assert wishes[-1] == client.current_wave == 5
        assert (await group.next_report()).wave_wanted == 0  # of the heartbeat: the second request wished for nothing


async def test_a_request_to_a_group_that_runs_wishes_for_nothing() -> None:
    async with puppet_client(2) as (client, group, _):
        members = Membership(1, [E0, E1], [[0], [1]], "here:1")
        status = MemberStatus(2, "here:1", members)
        group.publish_group(committed=members, wave_started=4)
        group.publish_loads(*(replace(group.engine_report(e, 1, applied=0), member=status) for e in (E0, E1)))
        await eventually(lambda: client.current_wave == 4 and client.snapshot_age_s() is not None)
        await client.add_request_async(make_request(client))
        assert client.current_wave == 4
