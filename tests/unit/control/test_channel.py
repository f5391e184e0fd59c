"""The control channel over a real Unix socket: calls both ways, and whatever else arrives."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.wire.codec import encode
from engine.wire.control import PauseMode
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import ClientId
from engine.wire.sockets import make_socket
from orchestrator.control.calls import MAX_OPEN_CALLS, Handler
from orchestrator.control.client import ControlClient
from orchestrator.control.errors import ControlError, ControlRefusedError, ControlUnavailableError
from orchestrator.control.messages import (
    AbortRequests,
    Call,
    CallResult,
    Fault,
    GetSettings,
    Hello,
    Pause,
    Resume,
    Sleep,
)
from orchestrator.control.server import ControlServer
from tests.unit.wire.mutations import mutations

TIMEOUT_S = 10.0


async def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def do_pause(operation: Pause) -> str:
    return operation.mode.name


async def refuse(_: Sleep) -> None:
    raise ControlRefusedError(Fault("not now", is_callers=True, subject="level"))


async def break_down(_: GetSettings) -> None:
    raise RuntimeError("a fault in here")


async def never(_: Resume) -> None:
    await asyncio.Event().wait()


SERVED: Mapping[type, Handler] = {Pause: do_pause, Sleep: refuse, GetSettings: break_down, Resume: never}


class ControlPair:
    def __init__(self, folder: Path) -> None:
        self.endpoint = ipc_endpoint(folder, "control")
        self.server = ControlServer(self.endpoint, SERVED)
        self.clients: list[ControlClient] = []

    async def join(self, index: int = 0, incarnation: int = 1, handlers: Mapping[type, Handler] = {}) -> ControlClient:
        client = ControlClient(ClientId(index, incarnation), self.endpoint, handlers)
        self.clients.append(client)
        client.start()
        await eventually(lambda: ClientId(index, incarnation) in self.server.peers)
        return client


@asynccontextmanager
async def channel() -> AsyncIterator[ControlPair]:
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        opened = ControlPair(Path(folder))
        try:
            yield opened
        finally:
            for client in opened.clients:
                await client.aclose()
            await opened.server.aclose()


async def test_a_call_is_answered_with_its_result() -> None:
    async with channel() as control:
        client = await control.join()
        assert await client.call(Pause(PauseMode.WAIT), TIMEOUT_S) == "WAIT"
        assert client.statistics() == {"control_calls": 0}


async def test_a_refusal_and_a_fault_reach_the_asker_and_the_line_lives() -> None:
    async with channel() as control:
        client = await control.join()
        with pytest.raises(ControlRefusedError, match="not now") as refused:
            await client.call(Sleep(1), TIMEOUT_S)
        assert refused.value.fault == Fault("not now", is_callers=True, subject="level")
        with pytest.raises(ControlRefusedError, match="RuntimeError: a fault in here") as broken:
            await client.call(GetSettings(), TIMEOUT_S)
        assert not broken.value.fault.is_callers
        with pytest.raises(ControlRefusedError, match="nobody here does AbortRequests"):
            await client.call(AbortRequests(None), TIMEOUT_S)
        assert await client.call(Pause(PauseMode.KEEP), TIMEOUT_S) == "KEEP"


async def test_an_answer_that_does_not_come_in_time_is_a_clear_error_and_leaves_nothing_behind() -> None:
    async with channel() as control:
        client = await control.join()
        with pytest.raises(ControlUnavailableError, match="did not answer within"):
            await client.call(Resume(), 0.05)
        assert client.statistics()["control_calls"] == 0


async def test_a_process_without_a_supervisor_says_so() -> None:
    client = ControlClient(ClientId(0, 1), None, {})
    client.start()
    with pytest.raises(ControlUnavailableError, match="without a supervisor"):
        await client.call(Resume(), TIMEOUT_S)
    await client.aclose()


async def test_closing_ends_the_calls_that_wait() -> None:
    async with channel() as control:
        client = await control.join()
        call = asyncio.create_task(client.call(Resume(), TIMEOUT_S))
        await eventually(lambda: client.statistics()["control_calls"] == 1)
        await client.aclose()
        with pytest.raises(ControlUnavailableError, match="shutting down"):
            await call


async def test_calls_that_wait_are_bounded() -> None:
    async with channel() as control:
        client = await control.join()
        calls = [asyncio.create_task(client.call(Resume(), TIMEOUT_S)) for _ in range(MAX_OPEN_CALLS)]
        await eventually(lambda: client.statistics()["control_calls"] == MAX_OPEN_CALLS)
        with pytest.raises(ControlUnavailableError, match="wait for their answer already"):
            await client.call(Resume(), TIMEOUT_S)
        await client.aclose()
        await asyncio.gather(*calls, return_exceptions=True)


async def never_abort(_: AbortRequests) -> None:
    await asyncio.Event().wait()


def saying(what: Any) -> Mapping[type, Handler]:
    async def say(_: AbortRequests) -> Any:
        return what

    return {AbortRequests: say}


async def test_every_process_is_asked_and_one_that_does_not_answer_is_named() -> None:
    async with channel() as control:
        await control.join(0, handlers=saying(["a"]))
        await control.join(1, handlers={AbortRequests: never_abort})
        await control.join(2)
        answers = await control.server.call_all(AbortRequests(["a"]), 0.2)
        assert answers.pop(ClientId(0, 1)) == ["a"]
        assert isinstance(answers.pop(ClientId(1, 1)), ControlError)
        assert "nobody here does" in str(answers.pop(ClientId(2, 1)))
        assert not answers


async def test_a_process_that_is_gone_is_not_waited_for() -> None:
    async with channel() as control:
        gone = await control.join(0, handlers=saying(1))
        await control.join(1, handlers=saying(2))
        await gone.aclose()
        control.server.forget(ClientId(0, 1))
        assert await control.server.call_all(AbortRequests(None), TIMEOUT_S) == {ClientId(1, 1): 2}


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_process_that_goes_while_it_is_asked_is_not_waited_for(comes_back: bool) -> None:
    async with channel() as control:
        await control.join(0, handlers={AbortRequests: never_abort})
        await control.join(1, handlers=saying(2))
        asking = asyncio.create_task(control.server.call_all(AbortRequests(None), TIMEOUT_S))
        await eventually(lambda: control.server.statistics()["control_calls"] == 1)
        if comes_back:
            await control.join(0, 2, saying("new"))
        else:
            control.server.forget(ClientId(0, 1))
        assert await asking == {ClientId(1, 1): 2}


async def test_asking_all_leaves_no_call_behind_however_it_ends() -> None:
    async with channel() as control:
        for index in range(2):
            await control.join(index, handlers={AbortRequests: never_abort})
        given_up = asyncio.create_task(control.server.call_all(AbortRequests(None), TIMEOUT_S))
        await eventually(lambda: control.server.statistics()["control_calls"] == 2)
        given_up.cancel()
        await asyncio.wait([given_up])
        num_askers = MAX_OPEN_CALLS // 2
        askers = [control.server.call_all(AbortRequests(None), TIMEOUT_S) for _ in range(num_askers - 1)]
        waiting = [asyncio.create_task(asker) for asker in askers]
        await eventually(lambda: control.server.statistics()["control_calls"] == 2 * (num_askers - 1))
        one_more = asyncio.create_task(control.server.call_all(AbortRequests(None), TIMEOUT_S))
        await eventually(lambda: control.server.statistics()["control_calls"] == MAX_OPEN_CALLS)
        with pytest.raises(ControlUnavailableError, match="wait for their answer already"):
            await control.server.call_all(AbortRequests(None), TIMEOUT_S)
        for task in (*waiting, one_more):
            task.cancel()
        await asyncio.wait((*waiting, one_more))
        assert control.server.statistics()["control_calls"] == 0


async def test_a_restarted_process_takes_the_place_of_its_predecessor() -> None:
    async with channel() as control:
        await control.join(0, 1, saying("old"))
        await control.join(0, 2, saying("new"))
        assert control.server.peers == [ClientId(0, 2)]
        late = ControlClient(ClientId(0, 1), control.endpoint, {})
        control.clients.append(late)
        late.start()
        await eventually(lambda: control.server.statistics().get("stale_control_peers"))
        assert await control.server.call_all(AbortRequests(None), TIMEOUT_S) == {ClientId(0, 2): "new"}


async def test_any_bytes_are_counted_and_survived() -> None:
    async with channel() as control:
        client = await control.join(handlers=saying(1))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        unknown_peer = make_socket(context, zmq.DEALER)
        unknown_peer.connect(control.endpoint)
        garbage = ([b""], [b"\xc1"], [b"\x93\x01\x02\x03"], [b"a", b"b"], [encode(7)], [encode([2, 1, ["sleep"]])])
        for frames in garbage:
            unknown_peer.send_multipart(list(frames))
        unknown_peer.send(encode(CallResult(99, "nobody asked")))
        await eventually(lambda: control.server.statistics().get("late_control_answers"))
        assert control.server.statistics()["malformed_control_messages"] == len(garbage)
        context.destroy(linger=0)
        assert await client.call(Pause(PauseMode.KEEP), TIMEOUT_S) == "KEEP"
        assert await control.server.call_all(AbortRequests(None), TIMEOUT_S) == {ClientId(0, 1): 1}


async def test_messages_with_odd_values_are_survived_too() -> None:
    calls = [Call(1, Pause(PauseMode.KEEP), 0.01), Call(2, Sleep(1), 0.01), Call(3, AbortRequests(["x"]), 0.01)]
    messages = [Hello(ClientId(7, 1)), *calls, CallResult(1, {"a": [1]}, Fault("no"))]
    odd = mutations([encode(message) for message in messages], seed=1)
    async with channel() as control:
        client = await control.join()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        unknown_peer = make_socket(context, zmq.DEALER)
        unknown_peer.connect(control.endpoint)
        for frame in itertools.islice(odd, 3_000):
            unknown_peer.send(frame)
            await asyncio.sleep(0)
        late = control.server.statistics().get("late_control_answers", 0)
        unknown_peer.send(encode(CallResult(2**40, "nobody asked")))
        await eventually(lambda: control.server.statistics().get("late_control_answers", 0) > late)
        assert control.server.statistics()["malformed_control_messages"] > 1_000
        context.destroy(linger=0)
        assert await client.call(Pause(PauseMode.KEEP), TIMEOUT_S) == "KEEP"


async def test_odd_messages_from_the_other_side_are_survived_by_the_client_too() -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = make_socket(context, zmq.ROUTER)
        router.bind(ipc_endpoint(Path(folder), "control"))
        client = ControlClient(ClientId(3, 1), ipc_endpoint(Path(folder), "control"), {})
        client.start()
        await eventually(lambda: router.poll(0))
        identity, hello = router.recv_multipart()
        assert hello == encode(Hello(ClientId(3, 1)))
        for frames in ([b"\xc1"], [b"", b""], [encode(CallResult(5))], [encode(Hello(ClientId(0, 1)))]):
            router.send_multipart([identity, *frames])
        await eventually(lambda: client.statistics().get("unexpected_control_messages"))
        assert client.statistics()["malformed_control_messages"] == 2
        assert client.statistics()["late_control_answers"] == 1
        await client.aclose()
        context.destroy(linger=0)
