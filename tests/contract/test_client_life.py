"""How a client starts, ends, is dropped and is cancelled: what the reference description promises, and its limits."""

import asyncio
import gc
import random
import weakref
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import uvloop

from client.async_mp_client import AsyncMPClient
from client.dplb_async_mp_client import DPLBAsyncMPClient
from engine.wire.codec import channel_decoder
from engine.wire.errors import AddressError, EngineDeadError
from engine.wire.messages import AddRequest, EngineCoreOutputs, FinishReason
from engine.wire.tensors import Tensor
from tests.contract.puppets import Puppets, eventually, make_output, make_request, puppet_client, puppets


def _client_tasks() -> list["asyncio.Task[Any]"]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("client ")]


def _task(name: str) -> "asyncio.Task[Any]":
    (task,) = [task for task in _client_tasks() if task.get_name().endswith(name)]
    return task


def test_a_client_can_be_made_before_any_loop_runs(tmp_path: Path) -> None:
    group = Puppets(tmp_path)
    client = DPLBAsyncMPClient(group.config)

    async def use() -> None:
        assert _client_tasks() == []
        (engine,) = await group.join(client)
        request = make_request(client)
        await client.add_request_async(request)
        await engine.next_message()
        engine.say(make_output(request, FinishReason.STOP))
        assert len((await client.get_output_async()).outputs) == 1
        await client.aclose()

    asyncio.run(use())
    group.close()


@pytest.mark.parametrize("handshake", [True, False])
def test_a_death_before_the_first_call_is_not_lost(tmp_path: Path, handshake: bool) -> None:
    """The last words wait in the socket until the output task starts; they may come alone or before the handshake."""
    group = Puppets(tmp_path)
    client = AsyncMPClient(group.config)

    async def engine_comes_and_dies() -> None:
        engine = group.open_engine()
        if handshake:
            engine.say_ready()
        engine.say(dead="out of memory")
        engine.outputs.close(linger=1000)

    async def use() -> None:
        with pytest.raises(EngineDeadError, match="out of memory"):
            await client.get_output_async()
        await client.aclose()

    asyncio.run(engine_comes_and_dies())
    asyncio.run(use())
    group.close()


async def test_last_words_that_overtake_the_handshake_are_not_lost() -> None:
    async with puppet_client() as (client, group, _):
        late = group.open_engine(rank=1)
        late.say(dead="died at birth")
        await eventually(lambda: any(view.state == "dead" for view in client.engine_views()))
        late.say_ready()
        await eventually(lambda: client.statistics().get("stale_handshakes"))
        assert [view.state for view in client.engine_views()] == ["ready", "dead"]


async def test_the_tasks_start_once_however_many_calls_are_made() -> None:
    async with puppet_client() as (client, _, _):
        before = {task.get_name() for task in _client_tasks()}
        await asyncio.gather(*(client.add_request_async(make_request(client)) for _ in range(5)))
        assert {task.get_name() for task in _client_tasks()} == before
        assert len(before) == 3


async def test_a_dropped_client_is_collected_and_its_tasks_and_sockets_go_with_it() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        (engine,) = await group.join(client)
        await client.add_request_async(make_request(client))
        resources, dropped = client._resources, weakref.ref(client)
        del client, engine
        gc.collect()
        assert dropped() is None
        assert resources.closed
        await eventually(lambda: not _client_tasks())


async def test_a_client_is_collected_while_its_task_has_work_waiting() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        (engine,) = await group.join(client)
        engine.say()
        dropped = weakref.ref(client)
        del client
        gc.collect()
        await eventually(lambda: not _client_tasks())
        assert dropped() is None


async def test_a_client_dropped_by_another_thread_is_closed_by_its_own_loop() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        await group.join(client)
        await asyncio.to_thread(client._resources.close)
        await eventually(lambda: not _client_tasks())
        assert client._resources.router.closed


@pytest.mark.parametrize("change", [{"output_bind": "ipc:///no/such/folder/o"}, {"state_endpoint": "nonsense"}])
async def test_a_construction_that_fails_leaves_nothing_open(change: dict[str, str]) -> None:
    async with puppets() as group:
        with pytest.raises(AddressError):
            DPLBAsyncMPClient(msgspec.structs.replace(group.config, **change))
        client = DPLBAsyncMPClient(group.config)  # the endpoints it had bound are free again
        await client.aclose()


async def test_closing_tells_the_coordinator_ends_every_wait_and_can_be_repeated() -> None:
    async with puppet_client() as (client, group, _):
        call = asyncio.create_task(client.call_utility_async("slow"))
        output = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0)
        await asyncio.gather(client.aclose(), client.aclose())
        await client.aclose()
        for waiting in (call, output):
            with pytest.raises(Exception, match="closed"):
                await waiting
        while not (await group.next_report()).leaving:
            pass
        with pytest.raises(EngineDeadError):
            await client.add_request_async(make_request(client))
        with pytest.raises(EngineDeadError):
            await client.get_output_async()


async def test_a_cancelled_output_task_ends_every_wait_at_once() -> None:
    async with puppet_client() as (client, _, (engine,)):
        call = asyncio.create_task(client.call_utility_async("slow"))
        await engine.next_message()
        _task("output").cancel()
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="cancelled"):
                await client.get_output_async()
        with pytest.raises(Exception, match="cancelled"):
            await call
        with pytest.raises(EngineDeadError):
            await client.add_request_async(make_request(client))


async def test_a_task_cancelled_before_it_ever_ran_ends_every_wait_too() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        _task("output").cancel()
        with pytest.raises(EngineDeadError, match="cancelled"):
            await client.get_output_async()
        await client.aclose()


async def test_waiting_for_engines_ends_with_the_line() -> None:
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        waiting = asyncio.create_task(client.wait_ready(60))
        await asyncio.sleep(0)
        _task("heartbeat").cancel()
        with pytest.raises(EngineDeadError, match="heartbeat"):
            await waiting
        await client.aclose()


async def test_batches_that_came_before_the_end_are_handed_out_before_it() -> None:
    async with puppet_client() as (client, _, (engine,)):
        request = make_request(client)
        await client.add_request_async(request)
        await engine.next_message()
        engine.say(make_output(request, None, 5))
        await eventually(lambda: client.statistics()["queued_outputs"])
        _task("output").cancel()
        await asyncio.sleep(0)
        assert (await client.get_output_async()).outputs[0].new_token_ids == [5]
        with pytest.raises(EngineDeadError):
            await client.get_output_async()


async def test_a_cancelled_state_task_is_no_silent_loss_either() -> None:
    async with puppet_client() as (client, _, _):
        _task("state").cancel()
        with pytest.raises(EngineDeadError, match="state"):
            await client.get_output_async()


async def test_a_hook_that_raises_ends_the_line_with_its_reason() -> None:
    class Broken(AsyncMPClient):
        def process_engine_outputs(self, outputs: object) -> None:
            raise ValueError("a bug in the hook")

    async with puppets() as group:
        client = Broken(group.config)
        engine = group.open_engine()
        engine.say_ready()
        await client.wait_ready(10)
        request = make_request(client)
        engine.say(make_output(request, None, 1))
        with pytest.raises(EngineDeadError, match="a bug in the hook"):
            await client.get_output_async()
        await client.aclose()


async def test_the_hook_of_the_class_sees_each_batch_before_its_consumer_and_may_change_it() -> None:
    class Watching(AsyncMPClient):
        seen: ClassVar[list[int]] = []

        def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
            self.seen.extend(output.request_id for output in outputs.outputs)
            outputs.outputs = outputs.outputs[:1]

    async with puppets() as group:
        client = Watching(group.config)
        client.process_engine_outputs = None  # type: ignore[method-assign,assignment]  # the class's alone is asked
        engine = group.open_engine()
        engine.say_ready()
        await client.wait_ready(10)
        requests = [make_request(client) for _ in range(2)]
        engine.say(*(make_output(request, None, 1) for request in requests))
        (kept,) = (await client.get_output_async()).outputs
        assert kept.request_id == requests[0].request_id
        assert Watching.seen == [request.request_id for request in requests]
        await client.aclose()


async def test_the_memory_of_a_tensor_is_held_until_it_has_left_whole() -> None:
    async with puppet_client() as (client, _, (engine,)):
        request = make_request(client)
        numbers = random.Random(1).randbytes(8 * 1024 * 1024)
        request.prompt_embeds = Tensor("uint8", (len(numbers),), numbers)
        await client.add_request_async(request)
        assert client.statistics()["pending_messages"] == 1
        frames = await eventually(engine.receive_frames)
        received = channel_decoder().decode_frames(frames)
        assert isinstance(received, AddRequest)
        assert received.prompt_embeds == request.prompt_embeds
        await eventually(lambda: client.statistics()["pending_messages"] == 0)


async def test_outputs_that_nobody_takes_stay_bounded_and_flow_again() -> None:
    async with puppet_client() as (client, _, (engine,)):
        request = make_request(client)
        await client.add_request_async(request)
        await engine.next_message()
        for token in range(3000):
            engine.say(make_output(request, None, token % 250, at=token))
        await eventually(lambda: client.statistics().get("output_pauses"))
        held = client.statistics()
        assert held["queued_outputs"] + held["queued_arrivals"] < 1200
        tokens = [(await client.get_output_async()).outputs[0].new_token_ids[0] for _ in range(3000)]
        assert tokens == [token % 250 for token in range(3000)]


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_works_on_both_event_loops(tmp_path: Path, new_event_loop: Any) -> None:
    async def use() -> None:
        async with puppet_client() as (client, _, (engine,)):
            requests = [make_request(client) for _ in range(20)]
            for request in requests:
                await client.add_request_async(request)
                await engine.next_message()
            engine.say(*(make_output(request, FinishReason.STOP) for request in requests))
            assert len((await client.get_output_async()).outputs) == 20

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(use())
