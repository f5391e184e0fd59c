"""The client against real engine processes and a real coordinator; the test plays the supervisor."""

import asyncio
import gc
import signal
from collections import Counter

import msgspec
import pytest

from client.dplb_async_mp_client import DPLBAsyncMPClient
from engine.wire.build import config_hash
from engine.wire.codec import output_decoder
from engine.wire.errors import StartupError, UtilityError
from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine.wire.states import ReplicaState
from engine.wire.tensors import Frames
from tests.contract.deployment import Deployment, deployment, eventually, finish, make_request
from tests.contract.puppets import ledger_loads

CRASH = 1
FOREVER = 100_000


def _ends(outputs: list[EngineCoreOutput]) -> list[FinishReason]:
    return [output.finish_reason for output in outputs if output.finish_reason is not None]


async def _start_streams(client: DPLBAsyncMPClient, count: int) -> dict[EngineId, list[AddRequest]]:
    """Start endless requests; return them by engine."""
    streams: dict[EngineId, list[AddRequest]] = {}
    for _ in range(count):
        request = make_request(client, max_tokens=FOREVER, ignore_eos=True)
        streams.setdefault(await client.add_request_async(request), []).append(request)
    return streams


async def test_requests_stream_from_every_rank_to_their_ends() -> None:
    async with deployment(2) as group, group.client(2) as client:
        requests = [make_request(client, max_tokens=12) for _ in range(20)]
        picks = Counter([await client.add_request_async(request) for request in requests])
        outputs = await finish(client, *requests)
        assert set(picks.values()) == {10}
        for request in requests:
            got = outputs[request.request_id]
            assert [output.first_position for output in got] == _positions(got)
            assert sum(len(output.new_token_ids) for output in got) == 12
            assert _ends(got) == [FinishReason.LENGTH]
        statistics = client.statistics()
        assert (statistics["in_flight"], statistics.get("output_gaps", 0)) == (0, 0)
        await eventually(lambda: ledger_loads(client) == [0, 0])
        await eventually(lambda: all(view.report is not None and view.ready for view in client.engine_views()))


def _positions(outputs: list[EngineCoreOutput]) -> list[int]:
    positions = [0]
    for output in outputs[:-1]:
        positions.append(positions[-1] + len(output.new_token_ids))
    return positions


async def test_an_abort_frees_every_sample_and_each_ends_once() -> None:
    async with deployment() as group, group.client() as client:
        first = make_request(client, max_tokens=FOREVER)
        second = make_request(client, max_tokens=FOREVER, seed=8)
        second.request_id, second.sample_index = first.request_id, 1
        for request in (first, second):
            await client.add_request_async(request)
        await client.get_output_async()
        await client.abort_requests_async([first.request_id])
        ends: Counter[int] = Counter()
        while len(ends) < 2:
            for output in (await client.get_output_async()).outputs:
                if output.finish_reason is not None:
                    assert output.finish_reason is FinishReason.ABORT
                    ends[output.sample_index] += 1
        assert ends == {0: 1, 1: 1}
        await eventually(lambda: client.statistics()["unapplied_messages"] == 0)


async def test_what_a_killed_engine_had_goes_on_elsewhere_after_its_death_is_confirmed() -> None:
    async with deployment(2) as group, group.client(2) as client:
        requests = [make_request(client, max_tokens=300, ignore_eos=True, seed=seed) for seed in range(10)]
        placed = {request.request_id: await client.add_request_async(request) for request in requests}
        victim = EngineId(0, 1)
        moved = [request for request in requests if placed[request.request_id] == victim]
        assert len(moved) == 5
        seen: set[int] = set()
        before = []
        while not seen.issuperset(request.request_id for request in moved):
            batch = await client.get_output_async()
            before += batch.outputs
            seen |= {output.request_id for output in batch.outputs}
        group.kill_engine(victim)
        await eventually(lambda: client.statistics()["queued_outputs"] >= 20)  # of the other one
        assert client.statistics()["waiting_to_move"] == 0  # nobody has confirmed anything yet
        group.set_replica(victim, ReplicaState.DEAD, "killed by signal 9")
        after = await finish(client, *requests)
        assert client.statistics()["moves_death"] == 5
        for request in requests:
            mine = [o for o in before if o.request_id == request.request_id] + after[request.request_id]
            assert [output.first_position for output in mine] == _positions(mine)
            assert _ends(mine) == [FinishReason.LENGTH]
        again = {request.request_id: make_request(client, max_tokens=300, ignore_eos=True) for request in requests}
        for request in requests:
            again[request.request_id].sampling = request.sampling
            await client.add_request_async(again[request.request_id])
        unbroken = await finish(client, *again.values())
        for request in requests:
            mine = [o for o in before if o.request_id == request.request_id] + after[request.request_id]
            assert _tokens(mine) == _tokens(unbroken[again[request.request_id].request_id])


def _tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


async def test_a_refilled_seat_serves_again_under_a_new_name() -> None:
    async with deployment(1) as group, group.client(1) as client:
        victim = EngineId(0, 1)
        group.kill_engine(victim)
        group.set_replica(victim, ReplicaState.DEAD, "killed by signal 9")
        await eventually(lambda: client.statistics()["candidates"] == 0)
        reborn = group.start_engine(0, incarnation=2)
        await client.wait_ready(30)
        request = make_request(client)
        assert await client.add_request_async(request) == reborn
        assert _ends((await finish(client, request))[request.request_id]) == [FinishReason.LENGTH]


async def test_a_request_that_kills_two_engines_gets_an_error_with_the_reason_and_no_innocent_one_does() -> None:
    async with deployment(3, crash_on_token=CRASH) as group, group.client(3) as client:
        requests = [make_request(client, max_tokens=100, ignore_eos=True) for _ in range(9)]
        for request in requests:
            await client.add_request_async(request)
        poison = make_request(client, bytes([CRASH]))
        await client.add_request_async(poison)
        outputs = await finish(client, *requests, poison)
        assert all(_ends(outputs[request.request_id]) == [FinishReason.LENGTH] for request in requests)
        (end,) = outputs[poison.request_id]
        assert end.finish_reason is FinishReason.ERROR
        assert "two engines in a row died" in (end.error or "")
        assert "SimulatedCrashError" in (end.error or "")
        assert len(client.engine_views()) == 3
        assert sorted(view.state for view in client.engine_views()) == ["dead", "dead", "ready"]


async def test_a_lost_last_frame_is_noticed_by_what_follows_it_and_the_stream_completes() -> None:
    class Lossy(DPLBAsyncMPClient):
        """Its line loses the first frame that ends something."""

        has_lost = False

        def _decode_outputs(self, frames: Frames) -> EngineCoreOutputs | None:
            outputs = output_decoder().decode(frames[0])
            if not self.has_lost and any(o.finish_reason is not None for o in outputs.outputs):
                self.has_lost = True
                return None
            return super()._decode_outputs(frames)

    async with deployment(1) as group:
        client = Lossy(group.client_config())
        await client.wait_ready(30)
        request = make_request(client, max_tokens=5)
        await client.add_request_async(request)
        outputs = (await finish(client, request))[request.request_id]
        assert client.has_lost
        assert [output.first_position for output in outputs] == _positions(outputs)
        assert len(_tokens(outputs)) == 5
        assert _ends(outputs) == [FinishReason.LENGTH]
        assert client.statistics()["moves_gap"] == 1
        await client.aclose()


async def test_an_engine_that_is_stopped_gives_its_streams_back_and_they_go_on_elsewhere() -> None:
    async with deployment(2) as group, group.client(2) as client:
        requests = [make_request(client, max_tokens=300, ignore_eos=True) for _ in range(6)]
        for request in requests:
            await client.add_request_async(request, data_parallel_rank=0)
        before: list[EngineCoreOutput] = []
        while len({output.request_id for output in before}) < len(requests):
            before += (await client.get_output_async()).outputs
        group.kill_engine(EngineId(0, 1), signal.SIGTERM)
        outputs = await finish(client, *requests)
        for request in requests:
            mine = [o for o in before if o.request_id == request.request_id] + outputs[request.request_id]
            assert len(_tokens(mine)) == 300
            assert _ends(mine) == [FinishReason.LENGTH]
        assert client.statistics()["moves_reroute"] == 6


async def test_a_leaving_engine_reroutes_and_its_streams_end_elsewhere() -> None:
    async with deployment(2) as group, group.client(2) as client:
        group.set_replica(EngineId(0, 1), ReplicaState.LEAVING)
        requests = [make_request(client) for _ in range(20)]
        for request in requests:
            await client.add_request_async(request)
        outputs = await finish(client, *requests)
        assert all(_ends(outputs[request.request_id]) == [FinishReason.LENGTH] for request in requests)


async def test_a_restarted_coordinator_disturbs_no_stream_and_picks_go_on_meanwhile() -> None:
    async with deployment(2) as group, group.client(2) as client:
        streams = await _start_streams(client, 4)
        group.coordinator.send_signal(signal.SIGKILL)
        group.coordinator.wait()
        requests = [make_request(client) for _ in range(10)]
        picks = Counter([await client.add_request_async(request) for request in requests])
        assert set(picks.values()) == {5}
        outputs = await finish(client, *requests)
        assert all(_ends(outputs[request.request_id]) == [FinishReason.LENGTH] for request in requests)
        assert {engine.poll() for engine in group.engines.values()} == {None}
        group.start_coordinator(generation=2)
        group.report()
        await eventually(lambda: _generations(client) == [2, 2])
        endless = [request for requests in streams.values() for request in requests]
        assert client.statistics()["in_flight"] == len(endless)
        await client.abort_requests_async([request.request_id for request in endless])
        outputs = await finish(client, *endless)
        assert all(_ends(outputs[request.request_id]) == [FinishReason.ABORT] for request in endless)


def _generations(client: DPLBAsyncMPClient) -> list[int]:
    """Return which coordinator's group state and snapshot the client believes."""
    newest = client._follower.group_state, client._follower.snapshot
    return [state.generation for state in newest if state is not None]


async def test_a_dropped_client_costs_its_engines_nothing_and_another_client_nothing_either() -> None:
    async with deployment(1) as group, group.client(1) as watcher:
        dropped = DPLBAsyncMPClient(group.client_config())
        await dropped.wait_ready(30)
        await _start_streams(dropped, 5)
        await eventually(lambda: _running(watcher) == 5)
        del dropped
        gc.collect()
        await eventually(lambda: not any(task.get_name().startswith("client 1.") for task in asyncio.all_tasks()))
        group.report(gone_clients=[group.client_config(index=1).client_id])
        await eventually(lambda: _running(watcher) == 0)


def _running(client: DPLBAsyncMPClient) -> int | None:
    (view,) = client.engine_views()
    return None if view.report is None else view.report.load.num_running


async def test_a_client_that_leaves_is_freed_at_once() -> None:
    async with deployment(1) as group, group.client(1) as watcher:
        async with group.client(1) as leaver:
            await _start_streams(leaver, 5)
            await eventually(lambda: _running(watcher) == 5)
        await eventually(lambda: _running(watcher) == 0)


async def test_an_engine_of_another_configuration_is_refused_naming_what_differs() -> None:
    async with deployment(0) as group:
        scheduler = msgspec.structs.replace(group.config.scheduler, block_size=32)
        other = msgspec.structs.replace(group.config, scheduler=scheduler)
        group.start_engine(0, engine=other, config_hash=config_hash(other))
        client = DPLBAsyncMPClient(group.client_config())
        with pytest.raises(StartupError, match=r"engine 0\.1: refused: its configuration is") as caught:
            await client.wait_ready(30)
        assert "; its scheduler.block_size is 32, ours is 16; engine" in str(caught.value), "and nothing else differs"
        await client.aclose()


async def test_a_utility_call_reaches_every_engine_and_an_unknown_one_names_every_rank() -> None:
    async with deployment(2) as group, group.client(2) as client:
        assert set(await client.call_utility_async("line_statistics")) == {0, 1}
        with pytest.raises(UtilityError) as caught:
            await client.call_utility_async("no_such_method")
        assert set(caught.value.failures) == {0, 1}


async def test_a_thousand_requests_leave_nothing_behind() -> None:
    async with deployment(2, step_s=0.001) as group, group.client(2) as client:
        consumer = asyncio.create_task(_consume(client, 1000))
        for _ in range(1000):
            await client.add_request_async(make_request(client, max_tokens=2))
            await asyncio.sleep(0)
        assert await consumer == 1000
        await eventually(lambda: client.statistics()["unapplied_messages"] == 0)
        statistics = client.statistics()
        assert (statistics["in_flight"], statistics["queued_outputs"], statistics.get("output_gaps", 0)) == (0, 0, 0)
        assert statistics.get("unexpected_outputs", 0) == 0
        _assert_ledgers_empty(group, client)


async def _consume(client: DPLBAsyncMPClient, count: int) -> int:
    ended = 0
    while ended < count:
        ended += len(_ends((await client.get_output_async()).outputs))
    return ended


def _assert_ledgers_empty(group: Deployment, client: DPLBAsyncMPClient) -> None:
    views = client.engine_views()
    assert {view.engine_id for view in views} == set(group.engines)
    assert all(view.num_in_flight == 0 for view in views)
    assert sum(view.num_picks for view in views) == 1000


async def test_clients_hear_of_elastic_changes_by_the_reference_names(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[EngineId, str]] = []

    async def note(_: DPLBAsyncMPClient, engine_id: EngineId, notification: str) -> None:
        heard.append((engine_id, notification))

    monkeypatch.setattr(DPLBAsyncMPClient, "eep_process_engine_core_notification", note)
    async with deployment(1) as group, group.client(1) as client:
        joined = group.start_engine(1, is_joining=True)
        await client.wait_ready(30, 2)
        await eventually(lambda: (EngineId(0, 1), "RECONFIGURE_FINISHED") in heard)
        group.kill_engine(joined, signal.SIGTERM)
        await eventually(lambda: (joined, "SHUTDOWN_COMPLETE") in heard)
    mine = [notification for engine_id, notification in heard if engine_id == joined]
    assert mine[:2] == ["NEW_CORE_ENGINES_INIT_READY", "NEW_CORE_ENGINES_WEIGHTS_INIT_READY"]
