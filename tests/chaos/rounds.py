"""Rounds of one fault each under open streams: all end with the text of the unbroken run, and the rank is replaced."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psutil

from tests.chaos.streams import Answer, Request, differences, send_all
from tests.integration.serving import Deployment, eventually, rank_is, ranks_of

Fault = Callable[[dict[str, Any]], None]
"""Takes the victim's row of ``/v1/cluster``."""

Compare = Callable[[Sequence[Request], Sequence[Answer], Sequence[Answer]], list[str]]


def kill_engine(row: dict[str, Any]) -> None:
    """``kill -9`` the engine's process."""
    os.kill(_pid(row), signal.SIGKILL)


def stop_engine(row: dict[str, Any]) -> None:
    """Stop the engine's process with SIGSTOP: it lives, and does nothing any more."""
    os.kill(_pid(row), signal.SIGSTOP)


def _pid(row: dict[str, Any]) -> int:
    assert row["pid"], "0 would be this process's own group"
    return int(row["pid"])


def kill_actor(row: dict[str, Any]) -> None:
    """``kill -9`` the process that the engine runs under: on Ray the actor's."""
    actor = psutil.Process(row["pid"]).parent()
    assert actor is not None
    assert actor.name().startswith("ray::")
    actor.kill()


def run_rounds(
    served: Deployment,
    requests: Sequence[Request],
    faults: Sequence[Fault],
    *,
    seed: int,
    longest_wait_s: float = 1.0,
    compare: Compare = differences,
) -> None:
    """Inject one fault after the other into a random rank at a random moment.

    longest_wait_s: until the fault, from the moment at which every stream has begun.
    """
    url, rng = served.wait_ready(), random.Random(seed)
    unbroken = asyncio.run(send_all(url, requests))
    errors = [(sent.body, got.error) for sent, got in zip(requests, unbroken, strict=True) if got.error]
    assert not errors, errors[:3]
    for number, fault in enumerate(faults):
        victim = rng.choice(list(ranks_of(url).values()))
        inject = partial(_inject, fault, victim, rng.uniform(0, longest_wait_s))
        wrong = compare(requests, unbroken, asyncio.run(send_all(url, requests, inject)))
        assert not wrong, f"round {number}, victim {victim['engine_id']}, {len(wrong)} differ:\n" + "\n".join(wrong[:5])
        successor = f"{victim['rank']}.{victim['incarnation'] + 1}"
        eventually(partial(rank_is, url, victim["rank"], successor))


async def _inject(fault: Fault, victim: dict[str, Any], wait_s: float) -> None:
    await asyncio.sleep(wait_s)
    fault(victim)
