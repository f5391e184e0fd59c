"""Faults and cancels in every phase of a scale operation: no request fails, the next one works, nothing leaks.

Ten rounds for each phase. A round polls the operation until it is in the phase and injects the fault then; an
operation that passed the phase between two polls is repeated. ``commit`` and ``publish`` have no test of their own:
they end within the poll in which they begin, because what they wait for comes with the same state as what ends the
phase before. The unit tests of the operation cover them, and a fault in ``prepare`` or ``switch`` often takes effect
there.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.chaos.scale_faults import (
    Fault,
    all_ready,
    cancel,
    kill_coordinator,
    kill_joining,
    kill_leaving,
    kill_old_rank,
    reach,
    stop_joining,
)
from tests.chaos.test_scale_cycles import SLACK, num_sockets_and_files, under_load
from tests.integration.scaling import begin, finish, ready_ranks, scale
from tests.integration.serving import Deployment, deployment, eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SIZE, LARGER = 3, 4
NUM_ROUNDS, NUM_TRIES = 10, 5
SIM = (
    *("--engine", "sim", "--executor", "local", "--data-parallel-size", str(SIZE), "--max-data-parallel-size", "4"),
    *("--sim-step-ms", "20", "--sim-load-s", "0.3", "--max-restarts", "1000"),
)
LOCKSTEP = (*SIM, "--enable-expert-parallel", "--sim-load-ms-per-expert", "50")

GROWING: dict[str, Sequence[Fault]] = {
    "reserve": (cancel, kill_old_rank, kill_coordinator),
    "spawn": (cancel, kill_joining, kill_old_rank, kill_coordinator),
    "load": (cancel, kill_joining, stop_joining, kill_old_rank, kill_coordinator),
    "handshake": (cancel, kill_joining, stop_joining, kill_old_rank, kill_coordinator),
}
SHRINKING: dict[str, Sequence[Fault]] = {
    "drain": (cancel, kill_leaving, kill_old_rank, kill_coordinator),
    "move": (cancel, kill_leaving, kill_old_rank, kill_coordinator),
    "stop": (cancel, kill_leaving, kill_old_rank, kill_coordinator),
    "release": (cancel, kill_old_rank, kill_coordinator),
}
SWITCHING: dict[str, Sequence[Fault]] = {
    "prepare": (cancel, kill_joining, kill_leaving, kill_old_rank, kill_coordinator),
    "switch": (cancel, kill_joining, kill_leaving, kill_old_rank, kill_coordinator),
}


@pytest.mark.parametrize("phase", [*GROWING, *SHRINKING])
def test_independent_ranks(phase: str) -> None:
    _fault_in(phase, (GROWING | SHRINKING)[phase], SIM)


@pytest.mark.parametrize("phase", [*GROWING, *SHRINKING, *SWITCHING])
def test_lockstep_ranks(phase: str) -> None:
    _fault_in(phase, (GROWING | SHRINKING | SWITCHING)[phase], LOCKSTEP)


def _fault_in(phase: str, faults: Sequence[Fault], options: Sequence[str]) -> None:
    with deployment(*options) as served:

        def act(http: httpx.Client) -> None:
            num_open = 0
            for number in range(NUM_ROUNDS):
                fault = faults[number % len(faults)]
                seeds = (number + NUM_ROUNDS * attempt for attempt in range(NUM_TRIES))
                assert any(_round(http, served, phase, fault, seed) for seed in seeds), (
                    f"no operation of {NUM_TRIES} was seen in phase {phase}"
                )
                num_open = num_open or num_sockets_and_files(served)  # once there are channels to the largest group
            assert num_sockets_and_files(served) <= num_open + SLACK
            assert not served.has_logged("SIGABRT")

        asyncio.run(under_load(served, act))
        served.end()


def _round(http: httpx.Client, served: Deployment, phase: str, fault: Fault, seed: int) -> bool:
    """Inject a fault in a phase of one operation and check how that ends; False when the phase was not seen."""
    rng, before = random.Random(seed), ready_ranks(http)
    operation = begin(http, **_request(phase, before, rng))
    hit = reach(http, operation, phase)
    if hit:
        fault(http, served, operation, rng)
    over = finish(http, operation)
    eventually(lambda: all_ready(http))
    expected = _ranks_after(over, before)
    assert ready_ranks(http) == expected, (over, before)
    scale(http, size=SIZE, drain_timeout=0.1)
    assert len(ready_ranks(http)) == SIZE
    eventually(lambda: len(served.processes("engine.main")) == SIZE, 10)
    return hit


def _request(phase: str, ranks: Sequence[int], rng: random.Random) -> dict[str, Any]:
    """Grow, shrink, or exchange an old rank for a new one, as the phase needs. The lowest or the highest leaves."""
    if phase in GROWING:
        return {"size": LARGER}
    leaving = {"remove": [rng.choice([ranks[0], ranks[-1]])], "drain_timeout": 0.4 if phase == "drain" else 0.0}
    return leaving | ({"size": SIZE} if phase in SWITCHING else {})


def _ranks_after(over: dict[str, Any], before: Sequence[int]) -> list[int]:
    if over["status"] != "done":
        return list(before)
    return sorted({*before, *over["joining"]} - {*over["leaving"]})
