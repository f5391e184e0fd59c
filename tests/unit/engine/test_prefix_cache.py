"""What of a sequence is found again, and what must never be."""

import pytest

from engine.interfaces.plan import Sample
from engine.scheduler.blocks import BlockPool
from engine.scheduler.prefix_cache import PrefixCache, block_hash, chain_start
from engine.scheduler.scheduler import Scheduler
from engine.wire.messages import EngineCoreOutput, FinishReason
from tests.unit.engine.builders import EOS, make_scheduler, make_sequence, run_step, sample_for

PROMPT = tuple(range(10, 20))


def finish(scheduler: Scheduler, request_id: int, prompt: tuple[int, ...] = PROMPT, **changes: object) -> int:
    """Run a sequence alone to its end; return how many of its tokens were cached."""
    scheduler.add(make_sequence(request_id, prompt=prompt, **({"max_tokens": 1} | changes)))  # type: ignore[arg-type]
    outputs: list[EngineCoreOutput] = []
    while scheduler.has_work():
        outputs += [output for output in run_step(scheduler) if output.request_id == request_id]
    return outputs[0].num_cached_tokens


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_name_depends_on_its_tokens_their_order_and_all_before_them() -> None:
    start = chain_start(None)
    names = {
        block_hash(start, [1, 2]),
        block_hash(start, [2, 1]),
        block_hash(start, [1, 2, 0]),
        block_hash(block_hash(start, [1, 2]), [1, 2]),
        block_hash(chain_start("a"), [1, 2]),
        block_hash(chain_start(""), [1, 2]),
    }
    assert len(names) == 6
    assert block_hash(start, [1, 2]) == block_hash(chain_start(None), (1, 2))


def test_a_block_is_named_once_per_sequence() -> None:
    pool = BlockPool(8, block_size=4)
    cache = PrefixCache(pool)
    sequence = make_sequence(1, 8)
    sequence.block_table = pool.allocate(2) or []
    cache.commit(sequence, 0, 8)
    names = list(sequence.block_hashes)
    sequence.token_ids[0] = 99  # would give other names, were they worked out again
    assert cache.find(sequence) == sequence.block_table[:1]
    assert sequence.block_hashes == names


# --- hits -----------------------------------------------------------------------------------------------------------


def test_full_blocks_of_an_equal_beginning_are_found_after_their_sequence_has_ended() -> None:
    scheduler = make_scheduler()
    assert finish(scheduler, 1) == 0
    assert finish(scheduler, 2) == 8
    assert finish(scheduler, 3, (*PROMPT[:5], 99, 99, 99, 99)) == 4
    load = scheduler.load()
    assert (load.num_prefix_query_tokens, load.num_prefix_hit_tokens) == (29, 12)


def test_at_least_one_token_is_computed() -> None:
    scheduler = make_scheduler()
    finish(scheduler, 1, PROMPT[:8])
    scheduler.add(make_sequence(2, prompt=PROMPT[:8]))
    (chunk,) = scheduler.plan().chunks
    assert (chunk.start, chunk.num_tokens, chunk.samples) == (4, 4, True)


def test_generated_tokens_are_found_too() -> None:
    scheduler = make_scheduler()
    finish(scheduler, 1, max_tokens=7)
    assert finish(scheduler, 2, (*PROMPT, *[50] * 7)) == 16


def test_blocks_of_a_running_sequence_are_shared_and_not_counted_twice() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, prompt=PROMPT))
    run_step(scheduler)
    scheduler.add(make_sequence(2, prompt=PROMPT))
    chunks = scheduler.plan().chunks
    assert [(c.sequence.request_id, c.start) for c in chunks] == [(1, 10), (2, 8)]
    assert chunks[0].sequence.block_table[:2] == chunks[1].sequence.block_table[:2]
    assert scheduler.load().kv_usage == pytest.approx(4 / 64)


def test_shared_blocks_make_room_where_copies_would_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=5)
    scheduler.add(make_sequence(1, prompt=PROMPT))
    run_step(scheduler)
    scheduler.add(make_sequence(2, prompt=PROMPT))
    assert len(scheduler.plan().chunks) == 2


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(num_seqs=1)
    scheduler.add(make_sequence(1, prompt=PROMPT, priority=1))
    run_step(scheduler)
    scheduler.add(make_sequence(2, max_tokens=1))
    run_step(scheduler)
    assert scheduler.load().num_preemptions == 1
    (chunk,) = scheduler.plan().chunks
    assert (chunk.sequence.request_id, chunk.start) == (1, 8)


def test_cached_tokens_are_told_with_the_first_tokens_alone() -> None:
    scheduler = make_scheduler()
    finish(scheduler, 1)
    scheduler.add(make_sequence(2, prompt=PROMPT))
    assert [run_step(scheduler)[0].num_cached_tokens for _ in range(2)] == [8, 0]


def test_salts_share_nothing() -> None:
    scheduler = make_scheduler()
    cached = [finish(scheduler, i, cache_salt=salt) for i, salt in enumerate([None, "a", "", "a", None])]
    assert cached == [0, 0, 0, 8, 8]


def test_without_prefix_caching_nothing_is_found() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    finish(scheduler, 1)
    assert finish(scheduler, 2) == 0


# --- what must not be found -----------------------------------------------------------------------------------------


def test_a_dropped_plan_leaves_nothing_to_find() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, prompt=PROMPT))
    scheduler.plan()
    scheduler.abort((1, 0), 0)
    scheduler.plan()
    assert finish(scheduler, 2) == 0


def test_an_abort_between_plan_and_apply_leaves_nothing_to_find() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, prompt=PROMPT))
    plan = scheduler.plan()
    scheduler.abort((1, 0), 0)
    scheduler.apply(plan, sample_for(plan), 0.0)
    assert finish(scheduler, 2) == 0


def test_of_a_prompt_cut_off_only_the_blocks_computed_are_found() -> None:
    scheduler = make_scheduler(num_tokens=6)
    scheduler.add(make_sequence(1, prompt=PROMPT))
    run_step(scheduler)
    scheduler.abort((1, 0), 0)
    assert finish(scheduler, 2) == 4


def test_a_sequence_that_fails_leaves_nothing_to_find() -> None:
    scheduler = make_scheduler(num_tokens=8)
    scheduler.add(make_sequence(1, prompt=PROMPT))
    run_step(scheduler)
    outputs = scheduler.apply(scheduler.plan(), [Sample(0, "not a number")], 0.0)
    assert [o.finish_reason for client in outputs.values() for o in client] == [FinishReason.ERROR]
    assert finish(scheduler, 2) == 0


def test_content_is_forgotten_when_its_block_is_planned_for_another_even_if_that_plan_is_dropped() -> None:
    scheduler = make_scheduler(num_blocks=3)
    finish(scheduler, 1)
    scheduler.add(make_sequence(2, 11, max_tokens=1))
    scheduler.plan()
    scheduler.abort((2, 0), 0)
    assert finish(scheduler, 3) == 0


def test_a_reset_forgets_what_is_free_and_tells_whether_anything_was_in_use() -> None:
    scheduler = make_scheduler()
    finish(scheduler, 1)
    assert scheduler.reset_prefix_cache() is True
    scheduler.add(make_sequence(2, prompt=PROMPT))
    run_step(scheduler)
    assert scheduler.reset_prefix_cache() is False
    run_step(scheduler, EOS)
    assert finish(scheduler, 3) == 8
