"""A real coordinator is kept alive: same endpoints, higher generation."""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.wire.codec import state_decoder
from engine.wire.endpoints import ipc_endpoint
from engine.wire.errors import ShoalError, StartupError
from engine.wire.messages import GROUP_TOPIC
from engine.wire.sockets import connect, make_socket
from lb.coordinator.config import CoordinatorSpec
from orchestrator.supervisor.coordinator_supervisor import RULE, CoordinatorSupervisor

DEADLINE_S = 30.0


@pytest.fixture
def spec() -> Iterator[CoordinatorSpec]:
    with tempfile.TemporaryDirectory(prefix="st", dir="/tmp") as folder:
        path = Path(folder)
        yield CoordinatorSpec(
            generation=1,
            report_endpoint=ipc_endpoint(path, "r"),
            state_endpoint=ipc_endpoint(path, "s"),
            settle_s=0.0,
        )


def never() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


async def wait_generation(socket: "zmq.Socket[bytes]", generation: int) -> None:
    """Read GroupStates until one of that generation comes."""
    decoder = state_decoder()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await asyncio.sleep(0.005)
            while socket.poll(0):
                if decoder.decode(socket.recv_multipart()[1]).generation == generation:
                    return


async def test_a_killed_coordinator_is_replaced_on_the_same_endpoints(spec: CoordinatorSpec) -> None:
    supervisor = CoordinatorSupervisor(spec, lambda _: None, lambda error: pytest.fail(str(error)))
    endpoints = await supervisor.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = make_socket(context, zmq.XSUB, topics=[GROUP_TOPIC])
    connect(listener, endpoints.state_endpoint)
    await wait_generation(listener, 1)
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    await wait_generation(listener, 2)
    assert await supervisor.stop(never()) == []
    context.destroy(linger=0)


async def test_a_coordinator_that_cannot_start_is_an_error_with_its_reason(spec: CoordinatorSpec) -> None:
    supervisor = CoordinatorSupervisor(
        CoordinatorSpec(generation=1, report_endpoint="ipc:///no/such/folder/r", state_endpoint=spec.state_endpoint),
        lambda _: None,
        lambda error: pytest.fail(str(error)),
    )
    with pytest.raises(StartupError, match=r"lb\.coordinator did not start: exit status 1: .*cannot bind"):
        await supervisor.start()
    assert await supervisor.stop(never()) == []


async def test_a_coordinator_that_dies_again_and_again_is_given_up(spec: CoordinatorSpec) -> None:
    given_up: asyncio.Future[ShoalError] = asyncio.get_running_loop().create_future()
    rule = replace(RULE, first_pause_s=0.0)
    supervisor = CoordinatorSupervisor(spec, lambda _: None, given_up.set_result, rule)
    await supervisor.start()
    async with asyncio.timeout(DEADLINE_S):
        while not given_up.done():
            assert supervisor.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor.pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
    assert "the coordinator died 6 times in a row: killed by SIGKILL" in str(given_up.result())
    assert await supervisor.stop(never()) == []


async def test_stop_ends_the_living_coordinator_for_good(spec: CoordinatorSpec) -> None:
    supervisor = CoordinatorSupervisor(spec, lambda _: None, lambda error: pytest.fail(str(error)))
    await supervisor.start()
    assert await supervisor.stop(never()) == []
    assert supervisor.pid is None
