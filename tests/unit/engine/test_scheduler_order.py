"""The order of sequences: which goes first, which is preempted, and that none waits for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.plan import StepPlan
from engine.scheduler.request_queues import ADMISSIONS_PER_TURN
from engine.scheduler.scheduler import Scheduler
from tests.unit.engine.builders import CLIENT, OTHER_CLIENT, make_scheduler, make_sequence, run_step


def planned(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.sequence.request_id, chunk.num_tokens) for chunk in plan.chunks]


# --- better priorities ----------------------------------------------------------------------------------------------


def test_a_better_priority_takes_the_slot_of_the_worst() -> None:
    scheduler = make_scheduler(num_seqs=2)
    scheduler.add(make_sequence(1, priority=1))
    scheduler.add(make_sequence(2, priority=2))
    run_step(scheduler)
    scheduler.add(make_sequence(3, priority=0))
    assert planned(scheduler.plan()) == [(1, 1), (3, 4)]
    assert scheduler.load().num_preemptions == 1


def test_an_equal_priority_takes_no_other_slot() -> None:
    scheduler = make_scheduler(num_seqs=1)
    scheduler.add(make_sequence(1))
    run_step(scheduler)
    scheduler.add(make_sequence(2))
    assert planned(scheduler.plan()) == [(1, 1)]


def test_a_migrated_one_comes_before_those_that_wait_and_takes_no_other_slot() -> None:
    scheduler = make_scheduler(num_seqs=2)
    for request_id in (1, 2, 3):
        scheduler.add(make_sequence(request_id))
    run_step(scheduler)
    for request_id in (4, 5):
        scheduler.add(make_sequence(request_id, attempt=1))
    assert planned(scheduler.plan()) == [(1, 1), (2, 1)]
    scheduler.abort((1, 0), 0)
    assert planned(scheduler.plan()) == [(2, 1), (4, 4)]
    scheduler.abort((2, 0), 0)
    assert planned(scheduler.plan()) == [(4, 4), (5, 4)]


def test_a_better_priority_takes_the_blocks_of_the_worst() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_sequence(1, 8, priority=1))
    scheduler.add(make_sequence(2, 4, priority=1))
    run_step(scheduler)
    scheduler.add(make_sequence(3, 12, priority=0))
    assert [request_id for request_id, _ in planned(scheduler.plan())] == [3]
    assert scheduler.load().num_preemptions == 2


def test_nobody_is_preempted_when_it_would_not_help() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_sequence(1, 8, priority=0, max_tokens=2))
    scheduler.add(make_sequence(2, 4, priority=1, max_tokens=2))
    run_step(scheduler)
    scheduler.add(make_sequence(3, 20, priority=0))
    assert [request_id for request_id, _ in planned(scheduler.plan())] == [1, 2]
    assert scheduler.load().num_preemptions == 0


def test_a_victims_block_that_others_use_or_the_new_one_finds_makes_no_room() -> None:
    scheduler = make_scheduler(num_blocks=5)
    for request_id in (1, 2):
        scheduler.add(make_sequence(request_id, prompt=(7,) * 9, priority=1))
        run_step(scheduler)
    scheduler.add(make_sequence(3, prompt=(7,) * 13, priority=0))
    (chunk,) = scheduler.plan().chunks
    assert (chunk.sequence.request_id, chunk.start) == (3, 8)
    assert scheduler.load().num_preemptions == 2


def test_a_better_new_request_is_prefilled_before_a_prompt_under_way() -> None:
    scheduler = make_scheduler(num_tokens=6)
    scheduler.add(make_sequence(1, 20, priority=1))
    run_step(scheduler)
    scheduler.add(make_sequence(2, 4, priority=0))
    assert planned(scheduler.plan()) == [(2, 4), (1, 2)]


def test_a_later_new_request_waits_for_the_prompt_under_way() -> None:
    scheduler = make_scheduler(num_tokens=6)
    scheduler.add(make_sequence(1, 20))
    run_step(scheduler)
    scheduler.add(make_sequence(2, 4))
    assert planned(scheduler.plan()) == [(1, 6)]


# --- nobody starves -------------------------------------------------------------------------------------------------


def keep_busy(scheduler: Scheduler, request_id: int, num_waiting: int) -> int:
    """Add better ones until so many wait; return the next request id."""
    while scheduler.load().num_waiting < num_waiting:
        scheduler.add(make_sequence(request_id, 1 + request_id % 7, priority=-1, max_tokens=1 + request_id % 3))
        request_id += 1
    return request_id


old_ones = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 16), st.integers(1, 12)), min_size=1, max_size=6)


@pytest.mark.parametrize("num_tokens", [2, 9])
@given(old=old_ones)
@settings(max_examples=10)
def test_everybody_finishes_while_better_ones_keep_coming(num_tokens: int, old: list[tuple[int, int, int]]) -> None:
    scheduler = make_scheduler(num_seqs=3, num_tokens=num_tokens, num_blocks=8)
    for request_id, (priority, num_prompt, max_tokens) in enumerate(old):
        scheduler.add(make_sequence(request_id, num_prompt, priority=priority, max_tokens=max_tokens))
    unfinished, next_id = set(range(len(old))), len(old)
    for _ in range(ADMISSIONS_PER_TURN * 50 * len(old)):
        next_id = keep_busy(scheduler, next_id, num_waiting=6)
        unfinished -= {o.request_id for o in run_step(scheduler) if o.finish_reason is not None}
        if not unfinished:
            return
    raise AssertionError(f"still unfinished: {unfinished}")


def test_better_ones_get_nearly_all_slots_meanwhile() -> None:
    scheduler = make_scheduler(num_seqs=1)
    for request_id in range(3):
        scheduler.add(make_sequence(request_id, max_tokens=1))
    ends: list[int] = []
    next_id = 3
    while len(ends) < 3 * (ADMISSIONS_PER_TURN + 1):
        next_id = keep_busy(scheduler, next_id, num_waiting=6)
        ends += [output.request_id for output in run_step(scheduler) if output.finish_reason is not None]
    assert [ends.index(request_id) for request_id in range(3)] == [32, 64, 96]


# --- stalled clients ------------------------------------------------------------------------------------------------


def test_a_stalled_client_gives_its_slots_and_blocks_to_others() -> None:
    scheduler = make_scheduler(num_seqs=1)
    scheduler.add(make_sequence(1))
    run_step(scheduler)
    scheduler.add(make_sequence(2, client_id=OTHER_CLIENT))
    scheduler.stall_client(CLIENT)
    assert planned(scheduler.plan()) == [(2, 4)]
    load = scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (1, 1, 5)


def test_what_a_stalled_client_adds_waits_too_and_all_goes_on_in_order_when_it_takes_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    scheduler.stall_client(CLIENT)
    scheduler.add(make_sequence(2))
    assert not scheduler.has_work()
    scheduler.resume_client(CLIENT)
    assert planned(scheduler.plan()) == [(1, 4), (2, 4)]


def test_a_step_under_way_is_committed_before_its_stalled_client_stands_aside() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    plan = scheduler.plan()
    scheduler.stall_client(CLIENT)
    assert scheduler.load().kv_usage > 0
    assert [output.new_token_ids for output in run_step(scheduler, plan=plan)] == [[50]]
    assert scheduler.load().kv_usage == 0
    assert not scheduler.has_work()


def test_sequences_of_a_stalled_client_can_be_aborted_and_freed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    scheduler.add(make_sequence(2))
    scheduler.stall_client(CLIENT)
    scheduler.abort((1, 0), 0)
    assert [output.request_id for output in run_step(scheduler)] == [1]
    scheduler.free_client(CLIENT)
    assert scheduler.load().num_waiting == 0


def test_stalling_twice_and_resuming_nobody_change_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.resume_client(CLIENT)
    scheduler.add(make_sequence(1))
    scheduler.stall_client(CLIENT)
    scheduler.stall_client(CLIENT)
    scheduler.resume_client(CLIENT)
    assert planned(scheduler.plan()) == [(1, 4)]
