"""Three API processes behind one port: how requests spread over them, what they count, and one that stands still."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack

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
    until,
)
from tests.integration.serving import CHAT, Deployment, deployment

MAX_PENDING = 36
MAX_TOKENS = 8  # of CHAT


@pytest.fixture(scope="module")
def served() -> Iterator[Deployment]:
    with deployment(*ARGUMENTS, f"--max-pending-requests={MAX_PENDING}") as running:
        running.wait_ready()
        yield running
        running.end()


@pytest.fixture(scope="module")
def url(served: Deployment) -> str:
    return served.wait_ready()


def test_new_connections_go_round(url: str) -> None:
    answered = Counter(httpx.get(f"{url}/v1/cluster", verify=False).json()["answered_by"] for _ in range(30))
    assert min(answered[index] for index in range(NUM_SERVERS)) >= 8


async def test_kept_connections_are_spread_evenly_also_when_they_come_at_once(url: str) -> None:
    before = open_connections(url)
    async with AsyncExitStack() as stack:
        arriving = [asyncio.open_connection(*url.removeprefix("http://").split(":")) for _ in range(60)]
        writers = [writer for _, writer in await asyncio.gather(*arriving)]
        for writer in writers:
            stack.callback(writer.close)
        await until(lambda: have_grown(url, before, 60))
        after = open_connections(url)
    assert max(after) - min(after) <= 9


def open_connections(url: str) -> list[int]:
    """Return the connections of each process; the one that asks is among them."""
    return [server["connections"] for server in httpx.get(f"{url}/v1/cluster", verify=False).json()["api_servers"]]


async def have_grown(url: str, before: list[int], by: int) -> bool:
    return sum(open_connections(url)) - sum(before) >= by


async def test_counters_sum_right_on_any_scrape_at_once(url: str) -> None:
    async with connections(url, 1) as by_server:
        clients = [of_one[0] for of_one in by_server]
        before = await counters(clients[0])
        for number in range(60):
            answer = await clients[number % NUM_SERVERS].post(CHAT_PATH, json=CHAT)
            assert answer.status_code == httpx.codes.OK
            if number % 10 == 9:  # no moment passes between the end of a request and the scrapes
                scrapes = [own_counts(await counters(client)) for client in clients]
                assert scrapes[0] == scrapes[1] == scrapes[2]
        after = await counters(clients[1])
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["shoal_requests_total", (("reason", "length"),)] == 60
    ranks = [(("engine", str(rank)),) for rank in range(NUM_RANKS)]
    assert sum(grown["shoal_generation_tokens_total", rank] for rank in ranks) == 60 * MAX_TOKENS
    assert sum(grown["shoal_e2e_request_latency_seconds_count", rank] for rank in ranks) == 60
    assert sum(grown["shoal_picks_total", rank] for rank in ranks) == 60
    assert grown["shoal_request_prompt_tokens_count", ()] == 60


def own_counts(found: Counts) -> Counts:
    """Return what API processes count themselves: what engines count comes with their reports, a little later."""
    return {key: value for key, value in found.items() if not key[0].startswith(("shoal_engine_", "shoal_prefix_"))}


async def test_what_engines_count_is_told_once(url: str) -> None:
    async with connections(url, 1) as by_server:
        for (client,) in by_server:

            async def is_told(client: httpx.AsyncClient = client) -> bool:
                found = await counters(client)
                ranks = [(("engine", str(rank)),) for rank in range(NUM_RANKS)]
                engines = [found["shoal_engine_generation_tokens_total", rank] for rank in ranks]
                return engines == [found["shoal_generation_tokens_total", rank] for rank in ranks]

            await until(is_told)


async def test_equal_request_ids_from_outside_disturb_nobody(url: str) -> None:
    async with connections(url, 4) as by_server:
        streams = [Stream(client, 40, **{"x-request-id": "same"}) for of_one in by_server for client in of_one]
        await asyncio.gather(*(stream.task for stream in streams))
    assert [stream.num_tokens for stream in streams] == [40] * 12


async def test_the_limit_of_requests_is_that_of_the_deployment(url: str) -> None:
    async with connections(url, MAX_PENDING // NUM_SERVERS + 1) as by_server:
        firsts = [client for of_one in by_server for client in of_one[1:]]
        streams = [Stream(client, 8_000) for client in firsts]

        async def are_open() -> bool:
            return bool((await cluster(by_server[0][0]))["pending_requests"] == MAX_PENDING)

        await until(are_open)
        statuses = [(await of_one[0].post(CHAT_PATH, json=CHAT)).status_code for of_one in by_server]
        assert statuses == [httpx.codes.SERVICE_UNAVAILABLE] * NUM_SERVERS
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


async def test_one_that_stands_still_holds_nobody_up(url: str) -> None:
    async with connections(url, 3) as by_server:
        others = [client for of_one in (by_server[0], by_server[2]) for client in of_one[1:]]
        watcher = by_server[0][0]
        streams = [Stream(client, 600) for client in others]
        frozen = Stream(by_server[1][1], 600)
        await until(lambda: all_began([*streams, frozen]))
        pid = (await cluster(watcher))["api_servers"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            since = time.monotonic()
            await until(lambda: lags(watcher, 1, 1.2))
            assert 1 not in [await answers(url) for _ in range(6)]
            until_now = time.monotonic()
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*(stream.task for stream in [*streams, frozen]))
    assert max(stream.longest_gap_s(since, until_now) for stream in streams) < 0.5
    assert [stream.num_tokens for stream in [*streams, frozen]] == [600] * 5


async def answers(url: str) -> int:
    """Return which process answers a new connection."""
    async with httpx.AsyncClient(base_url=url, timeout=5, verify=False) as client:
        return int((await cluster(client))["answered_by"])


async def lags(client: httpx.AsyncClient, index: int, seconds: float) -> bool:
    return bool((await cluster(client))["api_servers"][index]["loop_lag_s"] > seconds)
