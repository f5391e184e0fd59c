"""Scaling and deaths of ranks that share a real mixture of experts, under load: no token of any answer changes."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.chaos.scale_faults import all_ready
from tests.chaos.streams import Request, differences_within_margin, mixed_requests, send_all
from tests.integration.lockstep import pids, wait_whole
from tests.integration.scaling import begin, finish, ready_ranks, scale
from tests.integration.serving import DEADLINE_S, Deployment, deployment, eventually
from tests.integration.test_lockstep_torch import MODELS, save, serve_arguments

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

NUM_CYCLES = 10
SIZES = (4, 3, 1, 2)
REQUESTS = mixed_requests(20, 50, extra=[{"temperature": 0, "logprobs": True, "top_logprobs": 2}])


@pytest.mark.ray
def test_ten_cycles_on_ray(tmp_path: Path) -> None:
    arguments = serve_arguments(save("qwen3_moe", tmp_path), 2, executor="ray")
    with deployment(*arguments, "--max-data-parallel-size", "4") as served:

        def act(http: httpx.Client) -> None:
            for number in range(NUM_CYCLES):
                scale(http, size=4)
                ranks = ready_ranks(http)
                scale(http, remove=ranks[:2] if number % 2 else ranks[2:], drain_timeout=0.2)

        asyncio.run(_unchanged(served, REQUESTS, act))
        served.end()


@pytest.mark.parametrize("model", MODELS)
def test_every_family_through_all_sizes_with_deaths_in_between(model: str, tmp_path: Path) -> None:
    rng = random.Random(model)
    with deployment(*serve_arguments(save(model, tmp_path), 2)) as served:
        url = served.wait_ready()

        def act(http: httpx.Client) -> None:
            for size in SIZES:
                operation = begin(http, size=size, drain_timeout=0.2)
                _kill_one(url, rng)  # on the way, while a rank joins or leaves
                assert finish(http, operation)["status"] in ("done", "failed")  # a new one may have been hit
                eventually(lambda: all_ready(http))
                scale(http, size=size, drain_timeout=0.2)
                _kill_one(url, rng)
                wait_whole(url, size)

        asyncio.run(_unchanged(served, REQUESTS, act))
        served.end()


def _kill_one(url: str, rng: random.Random) -> None:
    """``kill -9`` a rank that is not the only one: with none left, new requests are refused."""
    while len(living := [pid for pid in pids(url).values() if pid]) > 1:
        with suppress(ProcessLookupError):  # it left by itself; the API shows it no more in a moment
            os.kill(rng.choice(living), signal.SIGKILL)
            return


async def _unchanged(served: Deployment, requests: Sequence[Request], act: Callable[[httpx.Client], None]) -> None:
    """Send the same requests again and again while something is done, and compare with the answers before it."""
    url = served.wait_ready()
    unbroken = await send_all(url, requests)
    assert not [answer.error for answer in unbroken if answer.error]
    with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as http:
        acting = asyncio.create_task(asyncio.to_thread(act, http))
        while not acting.done():
            wrong = differences_within_margin(requests, unbroken, await send_all(url, requests))
            assert not wrong, "\n".join(wrong[:5])
        await acting
