"""Deaths of the coordinator under load: nothing fails, picks stay even, no rank is suspect, it is replaced soon."""

import asyncio
import re
import time
from functools import partial

import httpx
import pytest

from tests.chaos.streams import NUM_STREAMS, differences, mixed_requests, send_all
from tests.integration.serving import Deployment, deployment, eventually, ranks_of

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SIM = ("--engine", "sim", "--executor", "local", "--data-parallel-size", "4", "--sim-step-ms", "10")
NUM_ROUNDS = 10
RECOVERED_S = 3.0
SPREAD = 0.10
NUM_WAVES = 8


def snapshot_age_s(url: str) -> float:
    (age,) = re.findall(r"^shoal_snapshot_age_seconds\S* (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return float(age)


def kill_coordinator(served: Deployment) -> None:
    (coordinator,) = served.processes("lb.coordinator")
    coordinator.kill()


async def kill_and_time_recovery(served: Deployment, url: str, generation: int) -> None:
    """Kill the coordinator and check how long it takes until the client has snapshots of its successor."""
    kill_coordinator(served)
    killed_at = time.monotonic()
    await asyncio.to_thread(eventually, partial(served.has_logged, f"starting generation {generation}"))
    await asyncio.to_thread(eventually, lambda: snapshot_age_s(url) > 0.3)  # that of the predecessor is stale
    await asyncio.to_thread(eventually, lambda: snapshot_age_s(url) < 0.3)
    assert time.monotonic() - killed_at <= RECOVERED_S


def test_no_stream_notices_and_no_rank_is_suspected() -> None:
    with deployment(*SIM, "--stall-timeout", "3") as served:
        url, requests = served.wait_ready(), mixed_requests(NUM_STREAMS, 300)
        unbroken = asyncio.run(send_all(url, requests))
        for generation in range(2, 2 + NUM_ROUNDS):
            inject = partial(kill_and_time_recovery, served, url, generation)
            wrong = differences(requests, unbroken, asyncio.run(send_all(url, requests, inject)))
            assert not wrong, "\n".join(wrong[:5])
            time.sleep(2.0)  # one that dies again at once is restarted with a back-off
        assert "gets no new requests" not in served.stderr
        assert "is dead" not in served.stderr
        served.end()


def test_picks_stay_even_while_it_is_away() -> None:
    with deployment(*SIM) as served:
        url, requests = served.wait_ready(), mixed_requests(NUM_STREAMS, 10)
        for wave in range(NUM_WAVES):
            if wave % 2:
                kill_coordinator(served)
            assert not [answer.error for answer in asyncio.run(send_all(url, requests)) if answer.error]
            eventually(lambda: len(served.processes("lb.coordinator")) == 1)
        picks = [row["picks"] for row in ranks_of(url).values()]
        even = sum(picks) / len(picks)
        assert all(abs(count - even) <= SPREAD * even for count in picks), picks
