"""New requests that begin with what a step computes already wait for it instead of computing it too."""

from typing import Any

import pytest

from engine.interfaces.plan import Sample, StepPlan
from engine.scheduler.scheduler import Scheduler
from tests.unit.engine.builders import make_scheduler, make_sequence, run_step, sample_for

PROMPT = tuple(range(10, 28))  # four full blocks of four and two tokens
NUM_SAMPLES = 5


def add_samples(
    scheduler: Scheduler, count: int = NUM_SAMPLES, prompt: tuple[int, ...] = PROMPT, **fields: Any
) -> None:
    for index in range(count):
        scheduler.add(make_sequence(1, prompt=prompt, sample_index=index, max_tokens=3, **fields))


def run_to_the_end(scheduler: Scheduler) -> tuple[int, int]:
    """Return (tokens of prompts that were computed, steps)."""
    num_tokens = num_steps = 0
    while scheduler.has_work():
        plan = scheduler.plan()
        num_tokens += sum(chunk.num_tokens for chunk in plan.chunks if chunk.start < chunk.sequence.num_prompt_tokens)
        num_steps += bool(plan.chunks)
        scheduler.apply(plan, sample_for(plan), 0.0)
    return num_tokens, num_steps


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(c.sequence.request_id, c.sequence.sample_index, c.num_tokens) for c in plan.chunks]


def test_the_samples_of_a_prompt_compute_its_full_blocks_once() -> None:
    scheduler = make_scheduler()
    add_samples(scheduler)
    num_tokens, num_steps = run_to_the_end(scheduler)
    spared = (NUM_SAMPLES - 1) * 16
    assert num_tokens == NUM_SAMPLES * len(PROMPT) - spared
    assert (scheduler.load().num_prefix_query_tokens, scheduler.load().num_prefix_hit_tokens) == (90, spared)
    assert num_steps == 3 + 1, "the others come one step later than the first"


def test_without_a_cache_nobody_is_deferred() -> None:
    scheduler = make_scheduler(num_tokens=200, enable_prefix_caching=False)
    add_samples(scheduler)
    assert run_to_the_end(scheduler) == (NUM_SAMPLES * len(PROMPT), 3)


@pytest.mark.parametrize("changes", [{"num_prompt_logprobs": 0}, {"prompt": PROMPT[:4]}])
def test_nobody_waits_for_what_would_spare_nothing(changes: dict[str, Any]) -> None:
    scheduler = make_scheduler(num_tokens=200)
    add_samples(scheduler, **changes)
    assert len(scheduler.plan().chunks) == NUM_SAMPLES


def test_a_prompt_in_chunks_is_waited_for_to_its_end() -> None:
    scheduler = make_scheduler(num_tokens=6)
    add_samples(scheduler, 2)
    assert [shape(scheduler.plan()) for _ in range(3) if run_step(scheduler) or True] == [
        [(1, 0, 6)],
        [(1, 0, 6)],
        [(1, 0, 1), (1, 1, 2)],
    ]
    assert scheduler.load().num_prefix_hit_tokens == 0, "counted when the second has run"
    run_step(scheduler)
    assert scheduler.load().num_prefix_hit_tokens == 16


def test_one_that_begins_otherwise_is_not_held_up_and_takes_no_slot_that_is_kept() -> None:
    scheduler = make_scheduler(num_seqs=3)
    add_samples(scheduler, 2)
    scheduler.add(make_sequence(7, 5, max_tokens=3))
    scheduler.add(make_sequence(8, 5, max_tokens=3))
    assert shape(scheduler.plan()) == [(1, 0, 18), (7, 0, 5)]
    run_step(scheduler)
    assert shape(scheduler.plan()) == [(1, 0, 1), (7, 0, 1), (1, 1, 2)]


def test_blocks_are_kept_for_a_deferred_sequence() -> None:
    scheduler = make_scheduler(num_blocks=5 + 1 + 4)
    add_samples(scheduler, 2)
    scheduler.add(make_sequence(7, 16, max_tokens=3))
    assert shape(scheduler.plan()) == [(1, 0, 18)]
    run_step(scheduler)
    assert shape(scheduler.plan()) == [(1, 0, 1), (1, 1, 2)]


def test_the_next_one_computes_what_the_first_did_not_bring_about() -> None:
    scheduler = make_scheduler()
    add_samples(scheduler, 3)
    scheduler.apply(scheduler.plan(), [Sample(0, "odd")], 0.0)
    assert shape(scheduler.plan()) == [(1, 1, 18)]
    scheduler.abort((1, 1), 0)
    assert shape(scheduler.plan()) == [(1, 2, 18)]


def test_a_dropped_plan_is_planned_again_with_the_same_deferred() -> None:
    scheduler = make_scheduler()
    add_samples(scheduler)
    assert shape(scheduler.plan()) == shape(scheduler.plan()) == [(1, 0, 18)]


def test_nobody_waits_for_a_prompt_that_comes_later_in_the_order() -> None:
    scheduler = make_scheduler(num_tokens=6)
    add_samples(scheduler, 1, priority=1)
    run_step(scheduler)
    scheduler.add(make_sequence(2, prompt=PROMPT, priority=0))
    assert shape(scheduler.plan())[0] == (2, 0, 6)
