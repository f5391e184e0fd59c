"""Scaling up and down under a steady load, with faults and cancels in between: no request fails, nothing leaks."""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from bench.streams import steady_load
from tests.chaos.scale_faults import all_ready, cancel, kill_joining, kill_old_rank, stop_joining
from tests.integration.scaling import begin, finish, look, ready_ranks, scale
from tests.integration.serving import DEADLINE_S, Deployment, deployment, eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

SIM = ("--engine", "sim", "--data-parallel-size", "2", "--sim-step-ms", "5", "--max-data-parallel-size", "4")
LOCAL = (*SIM, "--executor", "local", "--sim-load-s", "0.3", "--api-server-count", "2", "--max-restarts", "1000")
SIZES = (4, 2, 3, 1, 2)
NUM_CYCLES = 20
NUM_FAULT_ROUNDS = 10
REQUESTS_PER_S = 20.0


def cycle(http: httpx.Client, served: Deployment, number: int) -> None:
    """Go through all sizes; in every second cycle it is the lowest rank that leaves, else the highest."""
    for size in SIZES:
        ranks = ready_ranks(http)
        num_leaving = max(0, len(ranks) - size)
        remove = ranks[:num_leaving] if number % 2 else []
        scale(http, size=size, remove=remove, drain_timeout=0.2 * (number % 3))
        assert len(ready_ranks(http)) == size
        eventually(partial(_has_engines, served, size), 10)


async def under_load(served: Deployment, act: Callable[[httpx.Client], None]) -> None:
    """Do something while 20 requests a second come, none of which may fail."""
    url = served.wait_ready()
    with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as http:
        async with steady_load(url, REQUESTS_PER_S) as load:
            await asyncio.to_thread(act, http)
    assert load.streams
    assert load.num_failed == 0, f"{load.num_failed} of {len(load.streams)} requests failed"


@pytest.mark.parametrize(
    ("executor", "num_cycles"),
    [("local", NUM_CYCLES), pytest.param("ray", NUM_CYCLES // 4, marks=pytest.mark.ray)],
)
def test_cycles_fail_no_request_and_leave_nothing(executor: str, num_cycles: int) -> None:
    with deployment(*(LOCAL if executor == "local" else SIM)) as served:

        def act(http: httpx.Client) -> None:
            before = num_sockets_and_files(served)
            for number in range(num_cycles):
                cycle(http, served, number)
                if number == 0:
                    before = num_sockets_and_files(served)
            assert num_sockets_and_files(served) <= before + SLACK

        asyncio.run(under_load(served, act))
        served.end()


def test_rounds_of_faults_and_cancels_leave_the_old_size_and_the_next_scale_works() -> None:
    rng = random.Random(5)
    with deployment(*LOCAL) as served:

        def act(http: httpx.Client) -> None:
            for fault in [*[kill_joining, stop_joining, cancel] * NUM_FAULT_ROUNDS, *[kill_old_rank] * 3]:
                before = ready_ranks(http)
                operation = begin(http, size=4) if rng.random() < 0.6 else begin(http, remove=before[:1])
                if fault is not kill_old_rank:  # later it may be the only one left
                    wait_random(http, operation, rng)
                fault(http, served, operation, rng)
                over = finish(http, operation)
                eventually(lambda: all_ready(http))
                if over["status"] != "done":
                    assert ready_ranks(http) == before
                scale(http, size=2, drain_timeout=0.1)
                eventually(partial(_has_engines, served, 2), 10)

        asyncio.run(under_load(served, act))
        served.end()


def wait_random(http: httpx.Client, operation: dict[str, Any], rng: random.Random) -> None:
    """Wait for a random moment of an operation, or for its end."""
    moment_s = rng.uniform(0, 0.8)
    eventually(lambda: (seen := look(http, operation))["elapsed_s"] >= moment_s or seen["status"] != "running")


def _has_engines(served: Deployment, number: int) -> bool:
    return len(served.processes("engine.main")) == number


SLACK = 12
"""Descriptors of connections that come and go with the load."""


def num_sockets_and_files(served: Deployment) -> int:
    """Return the open descriptors of all processes that stay while ranks come and go."""
    staying = [psutil.Process(served.process.pid), *served.processes("orchestrator.api"), *served.processes("lb.coord")]
    return sum(process.num_fds() for process in staying)
