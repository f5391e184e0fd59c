"""Who is let in: handshakes, incarnations, refusals, and bytes of strangers."""

import asyncio
import random
import re

import pytest
import zmq

from client.connection_table import MAX_EARLY_FRAMES
from client.dplb_async_mp_client import DPLBAsyncMPClient
from engine.wire.codec import encode
from engine.wire.errors import StartupError
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import (
    EEP_NOTIFICATION_CALL_ID,
    GROUP_TOPIC,
    LOAD_TOPIC,
    EngineCoreOutputs,
    EngineReport,
    FinishReason,
    LoadSnapshot,
    UtilityOutput,
)
from engine.wire.replicas import ReplicaInfo
from engine.wire.sockets import connect, make_socket
from engine.wire.states import EnginePhase, EngineState, ReplicaState
from tests.contract.puppets import (
    BUILD_ID,
    CONFIG_HASH,
    Puppets,
    eventually,
    make_output,
    make_request,
    puppet_client,
    puppets,
)
from tests.unit.wire.mutations import mutations


async def test_a_client_says_who_it_is_and_where_it_listens_and_repeats_it() -> None:
    async with puppet_client() as (_, group, _):
        reports = [await group.next_report() for _ in range(3)]
        assert [report.info for report in reports] == [group.info] * 3
        assert [report.report_seq for report in reports] == [1, 2, 3]


@pytest.mark.parametrize(("field", "value", "ours"), [("build_id", "9.9", BUILD_ID), ("config_hash", "f", CONFIG_HASH)])
async def test_an_engine_of_another_build_or_configuration_is_refused_naming_both(
    field: str, value: str, ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        engine = group.open_engine()
        for _ in range(3):
            engine.say_ready(**{field: value})
        with pytest.raises(StartupError, match=re.escape(f" is {value}, ours is {ours}")) as caught:
            await client.wait_ready(10)
        assert "engine 0.1: refused" in str(caught.value)
        await eventually(lambda: client.statistics().get("refused_handshakes") == 3)
        assert sum("engine 0.1 is refused" in record.message for record in caplog.records) == 1
        (view,) = client.engine_views()
        assert (view.state, view.reason.startswith("refused")) == ("loading", True)
        await client.aclose()


async def test_waiting_for_engines_ends_by_its_deadline_and_says_who_is_missing_and_what_it_does() -> None:
    async with puppet_client() as (client, group, _):
        loading = EngineReport(
            EngineId(1, 1), 1, 0, 0, 0, 0, EnginePhase.LOADING, 0, False, {}, Load(), detail="weights", progress=0.4
        )
        replicas = [ReplicaInfo(EngineId(rank, 1), ReplicaState.STARTING) for rank in (0, 1, 2)]
        group.publish_loads(loading)
        group.publish_group(*replicas)
        await eventually(lambda: len(client.engine_views()) == 3 and client.snapshot_age_s() is not None)
        with pytest.raises(StartupError) as caught:
            await client.wait_ready(0.05, num_engines=3)
        message = str(caught.value)
        assert "1 of 3 engines ready" in message
        assert "engine 1.1: loading, weights (40%)" in message
        assert "engine 2.1: starting, has not reported" in message


async def test_waiting_without_a_coordinator_says_so() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        with pytest.raises(StartupError, match="nothing was heard from the coordinator"):
            await client.wait_ready(0.05)
        await client.aclose()


async def test_a_new_incarnation_takes_the_seat_and_what_the_old_one_had() -> None:
    async with puppet_client() as (client, group, (old,)):
        request = make_request(client)
        await client.add_request_async(request)
        new = group.open_engine(rank=0, incarnation=2)
        new.say_ready()
        moved = await new.next_message()
        assert (moved.request_id, moved.attempt, moved.channel_seq) == (request.request_id, 1, 1)
        old.say(make_output(request, FinishReason.STOP))
        await eventually(lambda: client.statistics().get("stale_outputs"))
        assert await client.add_request_async(make_request(client)) == EngineId(0, 2)
        assert [view.engine_id for view in client.engine_views()] == [EngineId(0, 2)]


async def test_a_second_handshake_of_the_same_engine_begins_a_new_line_with_what_the_old_one_had() -> None:
    async with puppet_client() as (client, group, (engine,)):
        request = make_request(client)
        await client.add_request_async(request)
        await engine.next_message()
        engine.say(make_output(request, None, 5))
        await client.get_output_async()
        engine.close()
        again = group.open_engine()
        again.say_ready()
        moved = await again.next_message()
        assert (moved.channel_seq, moved.attempt, moved.output_token_ids) == (1, 1, [5])
        again.say(make_output(request, FinishReason.STOP, 6, at=1))
        (end,) = (await client.get_output_async()).outputs
        assert (end.new_token_ids, end.finish_reason) == ([6], FinishReason.STOP)
        assert client.statistics()["moves_restart"] == 1


async def test_a_handshake_that_is_repeated_changes_nothing_and_one_of_the_next_line_begins_it() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        engine = group.open_engine()
        engine.say_ready(channel_number=1)
        await client.wait_ready(10)
        request = make_request(client)
        await client.add_request_async(request)
        assert (await engine.next_message()).attempt == 0
        engine.say_ready(channel_number=1)
        await eventually(lambda: client.statistics().get("repeated_handshakes"))
        assert "moves_restart" not in client.statistics()
        engine.say_ready(channel_number=2)
        moved = await engine.next_message()
        assert (moved.request_id, moved.attempt, moved.channel_seq) == (request.request_id, 1, 1)
        await client.aclose()


async def test_a_handshake_of_a_predecessor_is_stale() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        group.open_engine(rank=0, incarnation=2).say_ready()
        await client.wait_ready(10)
        group.open_engine(rank=0, incarnation=1).say_ready()
        await eventually(lambda: client.statistics().get("stale_handshakes"))
        assert await client.add_request_async(make_request(client)) == EngineId(0, 2)
        await client.aclose()


async def test_outputs_for_another_client_or_from_nobody_are_dropped() -> None:
    async with puppet_client() as (client, group, (engine,)):
        request = make_request(client)
        await client.add_request_async(request)
        engine.outputs.send(encode(EngineCoreOutputs(engine.engine_id, ClientId(0, 9), 1, 0, 0, [])))
        stranger = group.open_engine(rank=7)
        for _ in range(MAX_EARLY_FRAMES + 1):
            stranger.say(make_output(request, FinishReason.STOP))
        await eventually(lambda: {"misdirected_outputs", "stale_outputs"} <= client.statistics().keys())
        assert client.statistics()["in_flight"] == 1
        assert client.statistics()["stale_outputs"] == 1


async def test_outputs_that_overtake_the_handshake_count_once_it_has_come() -> None:
    async with puppet_client() as (client, group, _):
        engine = group.open_engine(rank=1)
        for notice in ("NEW_CORE_ENGINES_INIT_READY", "NEW_CORE_ENGINES_WEIGHTS_INIT_READY"):
            engine.say(utility=UtilityOutput(EEP_NOTIFICATION_CALL_ID, notice))
        await eventually(lambda: client.statistics()["early_outputs"] == 2)
        assert client.eep_scaling_cache == {}
        engine.say_ready()
        await eventually(lambda: client.eep_scaling_cache == {engine.engine_id: notice})
        statistics = client.statistics()
        assert statistics["early_outputs"] == statistics.get("output_gaps", 0) == 0


async def test_any_bytes_on_any_socket_are_survived() -> None:
    async with puppet_client() as (client, group, (engine,)):
        rng = random.Random(11)
        stranger = make_socket(group.context, zmq.DEALER, identity=rng.randbytes(9))
        connect(stranger, group.config.request_bind)
        await client.add_request_async(make_request(client))
        await engine.next_message()
        for number in range(500):
            noise = rng.randbytes(rng.randint(0, 60))
            stranger.send_multipart([noise] * rng.randint(1, 3))
            engine.channel.send(noise)
            engine.outputs.send_multipart([noise] * rng.randint(1, 3))
            group.states.send_multipart([rng.choice([GROUP_TOPIC, LOAD_TOPIC]), noise])
            group.states.send_multipart([GROUP_TOPIC] + [noise] * (number % 3))
        await _still_serves(client, group)
        await eventually(lambda: client.statistics().get("malformed_handshakes") == 1000)
        await eventually(lambda: client.statistics().get("malformed_outputs") == 500)
        await eventually(lambda: client.statistics().get("malformed_states") == 1000)


async def test_messages_with_odd_values_on_any_socket_are_survived() -> None:
    """They decode, some of them, and say what no peer of ours would say; a group state of theirs may even count."""
    async with puppet_client() as (client, group, (engine,)):
        requests = [make_request(client) for _ in range(3)]
        for request in requests:
            await client.add_request_async(request)
            await engine.next_message()
        outputs = [make_output(request, None, 5) for request in requests]
        said = EngineCoreOutputs(engine.engine_id, client.client_id, 1, 3, 1, outputs, UtilityOutput(1, {"x": [1]}))
        odd_outputs = mutations([encode(said)], seed=3)
        odd_handshakes = mutations([encode(engine.ready())], seed=4)
        odd_reports = mutations([encode(LoadSnapshot(1, 1, [group.engine_report(engine.engine_id, 1, 1)]))], seed=5)
        odd_groups = mutations([encode(group.group_state(ReplicaInfo(engine.engine_id, ReplicaState.ALIVE)))], seed=6)
        for _ in range(1500):
            engine.outputs.send(next(odd_outputs))
            engine.channel.send(next(odd_handshakes))
            group.states.send_multipart([LOAD_TOPIC, next(odd_reports)])
            group.states.send_multipart([GROUP_TOPIC, next(odd_groups)])
            await asyncio.sleep(0)
        group.publish_group(ReplicaInfo(EngineId(3, 1), ReplicaState.ALIVE), generation=2**64 - 1, seq=2**64 - 1)
        await _still_serves(client, group, num_engines=1)


async def _still_serves(client: DPLBAsyncMPClient, group: Puppets, num_engines: int = 2) -> None:
    engine = group.open_engine(rank=3)
    engine.say_ready()
    await client.wait_ready(10, num_engines)
    # An engine that the noise left connected may be the one that was counted.
    await eventually(lambda: EngineState.READY in {v.state for v in client.engine_views() if v.engine_id.rank == 3})
    request = make_request(client)
    await client.add_request_async(request, data_parallel_rank=3)
    await engine.next_message()
    engine.say(make_output(request, FinishReason.LENGTH, 1))
    while request.request_id not in {output.request_id for output in (await client.get_output_async()).outputs}:
        pass
