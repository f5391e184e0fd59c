"""One of three API processes is killed under load, and a real Prometheus looks on."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.api_callers import (
    ARGUMENTS,
    CHAT_PATH,
    NUM_RANKS,
    NUM_SERVERS,
    Counts,
    Stream,
    all_began,
    cluster,
    connections,
    counters,
    running,
    until,
)
from tests.integration.prometheus_server import Prometheus, prometheus
from tests.integration.serving import CHAT, chat, deployment, eventually


@pytest.fixture
def url() -> Iterator[str]:
    with deployment(*ARGUMENTS) as served:
        yield served.wait_ready()
        served.end()


@pytest.fixture
def scraper(url: str) -> Iterator[Prometheus]:
    with prometheus(url) as server:
        eventually(lambda: server.query("up == 1"))
        yield server


async def test_one_that_is_killed_takes_only_its_own_streams_along(url: str, scraper: Prometheus) -> None:
    async with connections(url, 5) as by_server:
        watcher = by_server[2][0]
        lost = [Stream(client, 8_000) for client in by_server[1][1:]]
        kept = [Stream(client, 500) for of_one in (by_server[0], by_server[2]) for client in of_one[1:]]
        await until(lambda: all_began([*lost, *kept]))
        before = await counters(watcher)
        victim = (await cluster(watcher))["api_servers"][1]
        os.kill(victim["pid"], signal.SIGKILL)

        async def are_freed() -> bool:
            return await running(watcher) <= len(kept)

        assert await until(are_freed) < 1.0
        await never_falling(watcher, before, victim["incarnation"])
        await asyncio.gather(*(stream.task for stream in [*lost, *kept]))
    assert all(stream.broken for stream in lost)
    assert [stream.num_tokens for stream in kept] == [500] * 8
    async with connections(url, 1) as by_server:
        assert (await by_server[1][0].post(CHAT_PATH, json=CHAT)).status_code == httpx.codes.OK
        shown = (await cluster(by_server[1][0]))["api_servers"]
        assert [server["pending_requests"] for server in shown] == [0] * NUM_SERVERS
        assert shown[1]["starts"] == victim["starts"] + 1
        await asyncio.to_thread(no_counter_fell, url, scraper)


async def never_falling(client: httpx.AsyncClient, before: Counts, incarnation: int) -> None:
    """Scrape again and again until process 1 is back under the next incarnation and reaches every rank."""

    async def is_back() -> bool:
        nonlocal before
        now = await counters(client)
        assert all(now[key] >= value for key, value in before.items())
        before = now
        server = (await cluster(client))["api_servers"][1]
        return bool(server["incarnation"] == incarnation + 1 and server["ready_ranks"] == NUM_RANKS)

    await until(is_back)


def no_counter_fell(url: str, scraper: Prometheus) -> None:
    """Ask Prometheus, which asked whichever process was next, also while one was dead."""
    length = 'shoal_requests_total{reason="length"}'
    told = next(line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(length))
    eventually(lambda: [value for _, value in scraper.query(length)] == [float(told.split()[-1])])
    assert scraper.query('resets({__name__=~"shoal_.+_(total|bucket|count|sum)"}[1h]) > 0') == []
    assert scraper.query("count(shoal_event_loop_lag_seconds)")[0][1] == NUM_SERVERS


def test_without_restarts_the_others_serve_on_until_the_last() -> None:
    with deployment(*ARGUMENTS, "--max-restarts=0", "--api-server-count=2") as served:
        url = served.wait_ready()
        first, second = (server["pid"] for server in httpx.get(f"{url}/v1/cluster").json()["api_servers"])
        os.kill(first, signal.SIGKILL)
        eventually(lambda: "died 1 times in a row: killed by SIGKILL; the others serve on" in served.stderr)
        assert chat(url) == "length"
        assert [server["pid"] for server in httpx.get(f"{url}/v1/cluster").json()["api_servers"]] == [0, second]
        os.kill(second, signal.SIGKILL)
        assert served.wait_exit() == 1
        served.assert_nothing_left()
