"""Both halves of the lockstep machine, searched together: see the README beside this file."""

import sys
import time

import pytest

from tests.model.scenarios import LARGE, SMALL, Scenario, random_walk
from tests.model.search import Found, Search, Walker, shortened
from tests.model.traces import write

_LARGE_S = 300.0
_NUM_WALKS = 300
_NUM_LONG_WALKS = 20_000


def check(found: Found, scenario: Scenario) -> None:
    """Fail with the shortest sequence that shows what was found."""
    if found.problem is not None:
        rules = scenario.rules()
        pytest.fail(f"{found.problem}\n{scenario}\n{write(found.trace, rules, scenario.start(rules))}")


def show(text: str) -> None:
    """Print past the capture of output: how much a search saw belongs to its result."""
    sys.__stdout__ and sys.__stdout__.write(f"{text}\n")


def search(scenario: Scenario, max_s: float) -> Found:
    rules = scenario.rules()
    began_at = time.process_time()
    found = Search(rules, max_s=max_s).run(scenario.start(rules))
    took_s = time.process_time() - began_at
    end = "all" if found.is_exhausted else "not all"
    show(f"{scenario}: {found.num_worlds} worlds, {found.num_events} events, {end}, {took_s:.1f} s")
    check(found, scenario)
    return found


@pytest.mark.parametrize("scenario", SMALL, ids=str)
def test_every_world_comes_to_rest(scenario: Scenario) -> None:
    assert search(scenario, max_s=60).is_exhausted


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_every_world_within_five_minutes_comes_to_rest() -> None:
    ends_at = time.process_time() + _LARGE_S
    for index, scenario in enumerate(LARGE):
        search(scenario, max_s=(ends_at - time.process_time()) / (len(LARGE) - index))


def walk(seeds: range, max_ranks: int) -> None:
    num_steps = 0
    for seed in seeds:
        _, rules, start = random_walk(seed, max_ranks)
        found = Walker(rules, seed).run(start)
        num_steps += found.num_worlds
        if found.problem is not None:
            pytest.fail(f"walk {seed}: {found.problem}\n{write(shortened(rules, start, found.trace), rules, start)}")
    show(f"{len(seeds)} walks of up to {max_ranks} ranks: {num_steps} steps")


def test_random_walks_come_to_rest() -> None:
    walk(range(_NUM_WALKS), max_ranks=4)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_twenty_thousand_random_walks_of_four_ranks_come_to_rest() -> None:
    walk(range(_NUM_WALKS, _NUM_WALKS + _NUM_LONG_WALKS), max_ranks=4)
