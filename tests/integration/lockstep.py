"""Observation of a lockstep group through the API, and faults injected under open streams."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.chaos.streams import Answer, Request, differences, send_all
from tests.integration.serving import HTTP, START_S, eventually

Inject = Callable[[], Awaitable[None]]


def cluster(url: str) -> dict[str, Any]:
    """Return ``/v1/cluster``."""
    return dict(HTTP.get(f"{url}/v1/cluster").json())


def group(url: str) -> dict[str, Any]:
    """Return the lockstep group of ``/v1/cluster``."""
    return dict(cluster(url)["group"])


def incarnations(url: str) -> dict[int, int]:
    """Return rank -> incarnation."""
    return {row["rank"]: row["incarnation"] for row in cluster(url)["ranks"]}


def pids(url: str) -> dict[int, int]:
    """Return rank -> process of its engine."""
    return {row["rank"]: row["pid"] for row in cluster(url)["ranks"]}


def is_whole(url: str, num_ranks: int) -> bool:
    """Tell whether every rank is ready and steps in the epoch in force, and nothing is being prepared."""
    seen = cluster(url)
    epoch = seen["group"]["epoch"] if seen["group"] else 0
    ready = [
        row
        for row in seen["ranks"]
        if row["state"] == "ready" and row["lockstep"] and row["lockstep"]["epoch"] == epoch
    ]
    return epoch > 0 and len(ready) == num_ranks == len(seen["group"]["members"]) and seen["group"]["proposal"] is None


def wait_whole(url: str, num_ranks: int) -> None:
    """Wait until it is whole; a rank that died has to start again first."""
    eventually(lambda: is_whole(url, num_ranks), START_S)


def wait_still(url: str, after_wave: int = 0) -> int:
    """Wait until every rank rests in the newest wave, which is later than this one; return the steps taken so far.

    after_wave: what is shown may be older than a wave that was just run: ranks that rest still, instead of again.
    """

    def is_still() -> bool:
        seen = cluster(url)
        wave, ranks = seen["group"]["wave"], seen["ranks"]
        return wave > after_wave and all((row["phase"], row["lockstep"]["wave"]) == ("idle", wave) for row in ranks)

    eventually(is_still)
    return num_steps(url)


def num_steps(url: str) -> int:
    """Return the steps of all ranks, empty ones included."""
    own = sum(int(row["num_steps"]) for row in HTTP.get(f"{url}/load").json()["ranks"])
    return own + sum(int(row["lockstep"]["empty_steps"]) for row in cluster(url)["ranks"])


def collective_s(url: str) -> dict[int, float]:
    """Return rank -> time it spent inside collectives."""
    text = HTTP.get(f"{url}/metrics").text
    found = re.findall(r'^shoal_engine_collective_seconds_total{engine="(\d+)"} (\S+)$', text, re.MULTILINE)
    return {int(rank): float(seconds) for rank, seconds in found}


def kill(*processes: int) -> None:
    """``kill -9`` processes at once."""
    assert all(processes), "0 would be this process's own group"
    for pid in processes:
        os.kill(pid, signal.SIGKILL)


def assert_unchanged(
    url: str,
    requests: Sequence[Request],
    unbroken: Sequence[Answer],
    inject: Inject,
    compare: Callable[[Sequence[Request], Sequence[Answer], Sequence[Answer]], list[str]] = differences,
) -> None:
    """Send everything at once, inject the fault when each stream has begun, and check that no answer changed."""
    wrong = compare(requests, unbroken, asyncio.run(send_all(url, requests, inject)))
    assert not wrong, f"{len(wrong)} of {len(requests)} differ:\n" + "\n".join(wrong[:5])
