"""Looks at a lockstep group from outside, and lets faults hit it under open streams."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from tests.chaos.streams import Ask, Said, ask_all, differences
from tests.integration.serving import eventually

Strike = Callable[[], Awaitable[None]]


def cluster(url: str) -> dict[str, Any]:
    """Return ``/v1/cluster``."""
    return dict(httpx.get(f"{url}/v1/cluster", timeout=30.0).json())


def group(url: str) -> dict[str, Any]:
    """Return what ``/v1/cluster`` says of the lockstep group."""
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
    """Wait until it is whole."""
    eventually(lambda: is_whole(url, num_ranks))


def num_steps(url: str) -> int:
    """Return the steps of all ranks, empty ones included."""
    own = sum(int(row["num_steps"]) for row in httpx.get(f"{url}/load", timeout=30.0).json()["ranks"])
    return own + sum(int(row["lockstep"]["empty_steps"]) for row in cluster(url)["ranks"])


def collective_s(url: str) -> dict[int, float]:
    """Return rank -> time it spent inside collectives."""
    text = httpx.get(f"{url}/metrics", timeout=30.0).text
    found = re.findall(r'^shoal_engine_collective_seconds_total{engine="(\d+)"} (\S+)$', text, re.MULTILINE)
    return {int(rank): float(seconds) for rank, seconds in found}


def kill(*processes: int) -> None:
    """``kill -9`` processes at once."""
    for pid in processes:
        os.kill(pid, signal.SIGKILL)


def assert_unbroken(
    url: str,
    asks: Sequence[Ask],
    unbroken: Sequence[Said],
    strike: Strike,
    compare: Callable[[Sequence[Ask], Sequence[Said], Sequence[Said]], list[str]] = differences,
) -> None:
    """Ask everything at once, strike when each stream has begun, and check that nothing was said differently."""
    wrong = compare(asks, unbroken, asyncio.run(ask_all(url, asks, strike)))
    assert not wrong, f"{len(wrong)} of {len(asks)} differ:\n" + "\n".join(wrong[:5])
