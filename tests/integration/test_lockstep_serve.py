"""A lockstep group behind the whole service: it steps together, rests together, and heals without loss for a stream.

One deployment of sim ranks for the module; each test leaves it whole. Rounds with many replacements are chaos tests.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.chaos.streams import Answer, mixed_requests, send_all
from tests.integration.lockstep import (
    Inject,
    assert_unchanged,
    collective_s,
    group,
    incarnations,
    is_whole,
    kill,
    num_steps,
    pids,
    wait_still,
    wait_whole,
)
from tests.integration.serving import HTTP, Deployment, chat, deployment, eventually, ranks_of
from tests.leaks import held, wait_given_back

NUM_RANKS, NUM_STREAMS, MAX_TOKENS = 3, 32, 60
# A rank is suspect after a third of it without a step. By then a stopped rank must have been silent for a second: its
# silence is all that tells it from the ranks that wait for it in the same collective.
STALL_TIMEOUT_S = "6"
SIM = (
    *("--engine", "sim", "--executor", "local", "--data-parallel-size", str(NUM_RANKS), "--enable-expert-parallel"),
    *("--sim-step-ms", "10", "--stall-timeout", STALL_TIMEOUT_S, "--max-restarts", "100"),
)
REQUESTS = mixed_requests(NUM_STREAMS, MAX_TOKENS)

GroupFault = Callable[[dict[int, int]], Awaitable[None]]
"""Takes rank -> pid."""


@pytest.fixture(scope="module", autouse=True)
def leak_check() -> Iterator[None]:
    """Look for leaks of the module and not of each test: an engine that replaced a dead one is the deployment's."""
    before = held()
    yield
    leaked = wait_given_back(before)
    assert not leaked, "left behind:\n" + "\n".join(sorted(leaked))


@pytest.fixture(scope="module")
def served(leak_check: None) -> Iterator[Deployment]:
    with deployment(*SIM) as running:
        running.wait_ready()
        yield running
        running.end()


@pytest.fixture(scope="module")
def unbroken(served: Deployment) -> list[Answer]:
    """Return the answers when nothing happens."""
    answers = asyncio.run(send_all(served.wait_ready(), REQUESTS))
    assert not [answer.error for answer in answers if answer.error]
    return answers


@pytest.fixture
def url(served: Deployment) -> Iterator[str]:
    """Return its base URL while it is whole, and wait until it is so again."""
    url = served.wait_ready()
    wait_whole(url, NUM_RANKS)
    yield url
    post(url, "/wake_up")
    post(url, "/resume")
    wait_whole(url, NUM_RANKS)


def post(url: str, path: str) -> None:
    answer = HTTP.post(url + path)
    assert answer.is_success, answer.text


def on(url: str, fault: GroupFault) -> Inject:
    """Return what injects a fault into the ranks that live when it is called."""

    async def inject() -> None:
        await fault(await asyncio.to_thread(pids, url))

    return inject


async def one_dies(processes: dict[int, int]) -> None:
    kill(processes[1])


async def the_first_dies(processes: dict[int, int]) -> None:
    kill(processes[0])


async def two_die(processes: dict[int, int]) -> None:
    kill(processes[0], processes[2])


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("fault", "dead"),
    [(one_dies, {1}), (the_first_dies, {0}), (two_die, {0, 2})],
    ids=["one", "first", "two"],
)
def test_deaths_under_load_change_no_answer(
    url: str, unbroken: list[Answer], fault: GroupFault, dead: set[int]
) -> None:
    before, epoch = incarnations(url), group(url)["epoch"]
    assert_unchanged(url, REQUESTS, unbroken, on(url, fault))
    eventually(lambda: is_whole(url, NUM_RANKS) and group(url)["epoch"] > epoch)
    assert incarnations(url) == {rank: number + (rank in dead) for rank, number in before.items()}


def test_a_second_death_while_the_group_heals_changes_no_answer(url: str, unbroken: list[Answer]) -> None:
    def is_healing() -> bool:
        proposal = group(url)["proposal"]
        return group(url)["epoch"] > epoch or (proposal is not None and proposal["direct"])

    async def fault(processes: dict[int, int]) -> None:
        kill(processes[0])
        await asyncio.to_thread(eventually, is_healing)
        kill(processes[1])

    epoch, before = group(url)["epoch"], incarnations(url)
    assert_unchanged(url, REQUESTS, unbroken, on(url, fault))
    eventually(lambda: is_whole(url, NUM_RANKS) and group(url)["epoch"] > epoch + 1)
    assert incarnations(url) == {0: before[0] + 1, 1: before[1] + 1, 2: before[2]}


@pytest.mark.chaos
def test_a_group_of_which_nobody_is_left_serves_again(url: str) -> None:
    before = incarnations(url)
    kill(*pids(url).values())
    eventually(lambda: incarnations(url) == {rank: number + 1 for rank, number in before.items()})
    wait_whole(url, NUM_RANKS)
    assert chat(url) == "length"


def test_of_a_group_that_stands_still_only_the_stopped_rank_is_named_and_killed(
    served: Deployment, url: str, unbroken: list[Answer]
) -> None:
    async def fault(processes: dict[int, int]) -> None:
        os.kill(processes[1], signal.SIGSTOP)

    before, num_logged = incarnations(url), len(served.stderr)
    assert_unchanged(url, REQUESTS, unbroken, on(url, fault))
    wait_whole(url, NUM_RANKS)
    assert incarnations(url) == before | {1: before[1] + 1}
    assert ranks_of(url)[1]["last_end"]
    named = [line for line in served.stderr[num_logged:].splitlines() if "gets no new requests" in line]
    others = [line for line in named if f"engine 1.{before[1]}" not in line]
    assert len(named) > len(others)
    # A busy machine may keep another rank silent for a second too; a rank that reports must not be named.
    assert [line for line in others if "silent for" not in line] == []


def test_an_idle_group_does_not_step_and_wakes_for_one_request(url: str) -> None:
    steps, wave = wait_still(url), group(url)["wave"]
    assert chat(url, max_tokens=20) == "length"
    after = wait_still(url, after_wave=wave)
    # 20 tokens on one rank; the others keep step, and all may meet once or twice more before they rest
    assert NUM_RANKS * 20 <= after - steps <= NUM_RANKS * 26


def test_time_inside_collectives_is_counted_of_every_rank_that_steps(url: str) -> None:
    wait_still(url)
    wave, before, began_at = group(url)["wave"], collective_s(url), time.monotonic()
    assert chat(url, max_tokens=20, data_parallel_rank=1) == "length"
    wait_still(url, after_wave=wave)
    spent = {rank: seconds - before[rank] for rank, seconds in collective_s(url).items()}
    elapsed_s = time.monotonic() - began_at
    assert sorted(spent) == list(range(NUM_RANKS))
    assert all(0.0 < seconds < elapsed_s for seconds in spent.values()), spent


def test_a_paused_group_rests_and_goes_on_where_it_was(url: str, unbroken: list[Answer]) -> None:
    async def pause_and_resume() -> None:
        await asyncio.to_thread(post, url, "/pause?mode=keep")
        steps = await asyncio.to_thread(wait_still, url)
        assert await asyncio.to_thread(num_steps, url) == steps
        await asyncio.to_thread(post, url, "/resume")

    assert_unchanged(url, REQUESTS, unbroken, pause_and_resume)


def test_a_group_that_sleeps_takes_up_its_streams_when_it_wakes(url: str, unbroken: list[Answer]) -> None:
    async def sleep_and_wake() -> None:
        await asyncio.to_thread(post, url, "/sleep?level=1")
        assert num_steps(url) == await asyncio.to_thread(wait_still, url)
        await asyncio.to_thread(post, url, "/wake_up")

    assert_unchanged(url, REQUESTS, unbroken, sleep_and_wake)


@pytest.mark.chaos
def test_a_rank_that_dies_during_a_pause_comes_back_into_the_group(url: str, unbroken: list[Answer]) -> None:
    async def pause_kill_resume() -> None:
        await asyncio.to_thread(post, url, "/pause?mode=keep")
        kill((await asyncio.to_thread(pids, url))[2])
        await asyncio.to_thread(wait_whole, url, NUM_RANKS)
        await asyncio.to_thread(post, url, "/resume")

    assert_unchanged(url, REQUESTS, unbroken, pause_kill_resume)


def test_nobody_misses_the_coordinator_while_it_is_replaced(
    served: Deployment, url: str, unbroken: list[Answer]
) -> None:
    async def kill_coordinator() -> None:
        (coordinator,) = served.processes("lb.coordinator")
        coordinator.kill()
        await asyncio.to_thread(eventually, lambda: pids_of_coordinator() - {coordinator.pid})

    def pids_of_coordinator() -> set[int]:
        return {process.pid for process in served.processes("lb.coordinator")}

    before = incarnations(url)
    assert_unchanged(url, REQUESTS, unbroken, kill_coordinator)
    wait_still(url)
    assert chat(url) == "length", "the new coordinator wakes a group that rests"
    assert incarnations(url) == before
