"""Rounds of one fault each under 64 open streams: all complete with the text of the unbroken run, the rank is back."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psutil

from tests.chaos.streams import Ask, Said, ask_all, differences
from tests.integration.serving import Deployment, eventually, rank_is, ranks_of

Fault = Callable[[dict[str, Any]], None]
"""Takes the victim's row of ``/v1/cluster``."""

Compare = Callable[[Sequence[Ask], Sequence[Said], Sequence[Said]], list[str]]


def kill_engine(row: dict[str, Any]) -> None:
    """``kill -9`` the engine's process."""
    os.kill(row["pid"], signal.SIGKILL)


def stop_engine(row: dict[str, Any]) -> None:
    """Freeze the engine's process."""
    os.kill(row["pid"], signal.SIGSTOP)


def kill_actor(row: dict[str, Any]) -> None:
    """``kill -9`` the process that the engine runs under: on Ray the actor's."""
    actor = psutil.Process(row["pid"]).parent()
    assert actor is not None
    assert actor.name().startswith("ray::")
    actor.kill()


def run_rounds(
    served: Deployment,
    asks: Sequence[Ask],
    faults: Sequence[Fault],
    *,
    seed: int,
    longest_wait_s: float = 1.0,
    compare: Compare = differences,
) -> None:
    """Let one fault after the other hit a random rank at a random moment.

    longest_wait_s: until the fault, from the moment at which every stream has begun.
    """
    url, rng = served.wait_ready(), random.Random(seed)
    unbroken = asyncio.run(ask_all(url, asks))
    errors = [(ask.body, said.error) for ask, said in zip(asks, unbroken, strict=True) if said.error]
    assert not errors, errors[:3]
    for number, fault in enumerate(faults):
        victim = rng.choice(list(ranks_of(url).values()))
        strike = partial(_strike, fault, victim, rng.uniform(0, longest_wait_s))
        wrong = compare(asks, unbroken, asyncio.run(ask_all(url, asks, strike)))
        assert not wrong, f"round {number}, victim {victim['engine_id']}, {len(wrong)} differ:\n" + "\n".join(wrong[:5])
        successor = f"{victim['rank']}.{victim['incarnation'] + 1}"
        eventually(partial(rank_is, url, victim["rank"], successor))


async def _strike(fault: Fault, victim: dict[str, Any], wait_s: float) -> None:
    await asyncio.sleep(wait_s)
    fault(victim)
