"""Callers that know which of several API processes they speak to, and what these processes tell."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.serving import CHAT

NUM_SERVERS = 3
NUM_RANKS = 2
CHAT_PATH = "/v1/chat/completions"
TIMEOUT_S = 60.0

_COMPLETION_TOKENS = re.compile(r'"completion_tokens":(\d+)')

ARGUMENTS = (
    "--engine=sim",
    "--executor=local",
    f"--data-parallel-size={NUM_RANKS}",
    f"--api-server-count={NUM_SERVERS}",
    "--sim-step-ms=5",
)

Counts = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@asynccontextmanager
async def connections(url: str, num_each: int) -> AsyncIterator[list[list[httpx.AsyncClient]]]:
    """Yield, by process index, that many clients of one open connection each to that process."""
    found: list[list[httpx.AsyncClient]] = [[] for _ in range(NUM_SERVERS)]
    async with AsyncExitStack() as stack:
        for _ in range(10 * num_each * NUM_SERVERS):
            if min(map(len, found)) >= num_each:
                break
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=False))
            found[(await cluster(client))["answered_by"]].append(client)
        yield [clients[:num_each] for clients in found]


async def cluster(client: httpx.AsyncClient) -> Any:
    return (await client.get("/v1/cluster")).json()


async def counters(client: httpx.AsyncClient) -> Counts:
    """Return every counter and bucket that one process tells."""
    text = (await client.get("/metrics")).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type in ("counter", "histogram")
    }


class Stream:
    """One streamed chat. times: when its texts came. num_tokens: what its usage says in the end, 0 before."""

    def __init__(self, client: httpx.AsyncClient, max_tokens: int, **headers: str) -> None:
        self._client = client
        self._body = CHAT | {"stream": True, "max_tokens": max_tokens, "stream_options": {"include_usage": True}}
        self._headers = headers
        self.times: list[float] = []
        self.broken = False
        self.num_tokens = 0
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with self._client.stream("POST", CHAT_PATH, json=self._body, headers=self._headers) as answer:
                assert answer.status_code == httpx.codes.OK
                async for line in answer.aiter_lines():
                    if '"content":"' in line and '"content":""' not in line:
                        self.times.append(time.monotonic())
                    if found := _COMPLETION_TOKENS.search(line):
                        self.num_tokens = int(found[1])
        except httpx.TransportError:
            self.broken = True

    def longest_gap_s(self, since: float, until: float) -> float:
        """Return the longest wait for a chunk in that time."""
        times = [since, *(moment for moment in self.times if since < moment < until), until]
        return max(later - earlier for earlier, later in pairwise(times))


async def until(condition: Callable[[], Awaitable[bool]], deadline_s: float = 10.0) -> float:
    """Wait until an async condition is true; return the seconds it took."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < deadline_s
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def running(client: httpx.AsyncClient) -> int:
    """Return the sequences that the engines have, by their own reports."""
    return sum(rank["running"] + rank["waiting"] for rank in (await cluster(client))["ranks"])


async def all_began(streams: list[Stream]) -> bool:
    """Tell whether each stream has had its first text."""
    return all(stream.times for stream in streams)
