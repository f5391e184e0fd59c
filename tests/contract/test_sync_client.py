"""The client for callers without an event loop: how it waits, ends, is dropped, and that it is the other one's twin."""

import gc
import inspect
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from client.dplb_async_mp_client import DPLBAsyncMPClient
from client.sync_mp_client import MAX_UNREAD_BATCHES, SyncMPClient
from engine.wire.codec import report_decoder
from engine.wire.errors import AddressError, EngineDeadError
from engine.wire.messages import FinishReason
from tests.contract.puppets import DEADLINE_S, PuppetEngine, Puppets, make_output, make_request


def eventually(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (seen := look()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)
    return seen


@pytest.fixture
def group() -> Iterator[Puppets]:
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        group = Puppets(Path(folder))
        yield group
        group.close()


def join(client: SyncMPClient, group: Puppets) -> PuppetEngine:
    engine = group.open_engine()
    engine.say_ready()
    client.wait_ready(DEADLINE_S)
    return engine


@pytest.fixture
def client(group: Puppets) -> Iterator[SyncMPClient]:
    client = SyncMPClient(group.config)
    yield client
    client.close()


def threads_of_clients() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("client ")]


def test_requests_outputs_and_calls_pass_without_a_loop(client: SyncMPClient, group: Puppets) -> None:
    engine = join(client, group)
    request = make_request(client)
    assert client.add_request(request) == engine.engine_id
    eventually(engine._receive)
    engine.say(make_output(request, FinishReason.STOP, 5))
    (output,) = client.get_output(DEADLINE_S).outputs
    assert (output.request_id, output.new_token_ids) == (request.request_id, [5])
    assert client.statistics()["in_flight"] == 0
    assert [view.state for view in client.engine_views()] == ["ready"]


def test_each_method_has_the_signature_of_its_awaited_twin() -> None:
    for name in ("add_request", "abort_requests", "call_utility", "collective_rpc"):
        twin = getattr(DPLBAsyncMPClient, f"{name}_async")
        assert inspect.signature(getattr(SyncMPClient, name)) == inspect.signature(twin), name
    for name in ("wait_ready", "engine_views", "statistics"):
        twin = getattr(DPLBAsyncMPClient, name)
        assert inspect.signature(getattr(SyncMPClient, name)) == inspect.signature(twin), name


def test_a_wait_for_outputs_may_have_a_deadline(client: SyncMPClient) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        client.get_output(0.01)


def test_a_dropped_client_is_collected_and_its_thread_and_sockets_go_with_it(group: Puppets) -> None:
    client = SyncMPClient(group.config)
    join(client, group)
    client.add_request(make_request(client))
    resources, dropped = client._client._resources, weakref.ref(client)
    del client
    gc.collect()
    assert dropped() is None
    eventually(lambda: not threads_of_clients())
    assert resources.closed


def test_when_the_thread_ends_every_wait_and_every_later_call_says_so(client: SyncMPClient, group: Puppets) -> None:
    engine = join(client, group)
    with ThreadPoolExecutor(2) as pool:
        waits: list[Future[Any]] = [pool.submit(client.get_output), pool.submit(client.call_utility, "slow")]
        eventually(engine._receive)
        client._thread.stop()
        for wait in waits:
            with pytest.raises(EngineDeadError):
                wait.result(DEADLINE_S)
    client._thread.join()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="ended"):
            client.get_output()
        with pytest.raises(EngineDeadError, match="ended"):
            client.add_request(make_request(client))
    client.close()
    assert client._client._resources.closed


def test_batches_that_came_before_the_end_are_handed_out_before_it(client: SyncMPClient, group: Puppets) -> None:
    engine = join(client, group)
    request = make_request(client)
    client.add_request(request)
    eventually(engine._receive)
    engine.say(make_output(request, None, 5))
    eventually(lambda: client.statistics()["unread_batches"])
    client.close()
    assert client.get_output().outputs[0].new_token_ids == [5]
    with pytest.raises(EngineDeadError, match="closed"):
        client.get_output()


def test_outputs_that_nobody_takes_stay_bounded_and_flow_again(client: SyncMPClient, group: Puppets) -> None:
    engine = join(client, group)
    request = make_request(client)
    client.add_request(request)
    eventually(engine._receive)
    for token in range(3000):
        engine.say(make_output(request, None, token % 250, at=token))
    eventually(lambda: client.statistics().get("output_pauses"))
    held = client.statistics()
    assert held["unread_batches"] <= MAX_UNREAD_BATCHES
    assert held["queued_outputs"] + held["queued_arrivals"] < 1200
    tokens = [client.get_output(DEADLINE_S).outputs[0].new_token_ids[0] for _ in range(3000)]
    assert tokens == [token % 250 for token in range(3000)]


def test_closing_tells_the_coordinator_and_can_be_repeated(client: SyncMPClient, group: Puppets) -> None:
    join(client, group)
    client.close()
    client.close()
    decode = report_decoder().decode
    eventually(lambda: (frame := group._receive_report()) is not None and getattr(decode(frame), "leaving", False))


def test_a_construction_that_fails_leaves_nothing_open(group: Puppets) -> None:
    with pytest.raises(AddressError):
        SyncMPClient(msgspec.structs.replace(group.config, output_bind="ipc:///no/such/folder/o"))
    assert not threads_of_clients()
    SyncMPClient(group.config).close()  # the endpoints it had bound are free again
