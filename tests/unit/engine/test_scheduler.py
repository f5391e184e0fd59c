"""Step by step: what is planned, and what becomes of it."""

from collections.abc import Sequence

import pytest

from engine.interfaces.plan import Sample, StepPlan
from engine.wire.logprobs import Logprobs
from engine.wire.messages import EngineCoreOutput, ErrorKind, FinishReason
from tests.unit.engine.builders import (
    CLIENT,
    EOS,
    OTHER_CLIENT,
    make_scheduler,
    make_sequence,
    run_step,
    sample_for,
)


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(c.sequence.request_id, c.start, c.num_tokens, c.samples) for c in plan.chunks]


def ends(outputs: Sequence[EngineCoreOutput]) -> list[tuple[int, FinishReason]]:
    return [(o.request_id, o.finish_reason) for o in outputs if o.finish_reason is not None]


def test_a_prompt_is_computed_in_one_step_and_yields_its_first_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 6))
    plan = scheduler.plan()
    assert shape(plan) == [(1, 0, 6, True)]
    outputs = scheduler.apply(plan, [Sample(50)], now=0.0)
    assert [(o.request_id, o.first_position, o.new_token_ids) for o in outputs[CLIENT]] == [(1, 0, [50])]
    assert shape(scheduler.plan()) == [(1, 6, 1, True)]


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_first() -> None:
    scheduler = make_scheduler(num_tokens=5)
    scheduler.add(make_sequence(1, 4))
    run_step(scheduler)
    scheduler.add(make_sequence(2, 10))
    assert shape(scheduler.plan()) == [(1, 4, 1, True), (2, 0, 4, False)]
    run_step(scheduler)
    assert shape(scheduler.plan()) == [(1, 5, 1, True), (2, 4, 4, False)]
    run_step(scheduler)
    assert shape(scheduler.plan()) == [(1, 6, 1, True), (2, 8, 2, True)]


def test_no_more_sequences_run_than_max_num_seqs() -> None:
    scheduler = make_scheduler(num_seqs=2)
    for request_id in (1, 2, 3):
        scheduler.add(make_sequence(request_id))
    assert [c.sequence.request_id for c in scheduler.plan().chunks] == [1, 2]
    assert scheduler.load().num_waiting == 1


def test_a_better_priority_is_admitted_first() -> None:
    scheduler = make_scheduler(num_seqs=1)
    scheduler.add(make_sequence(1, priority=5))
    scheduler.add(make_sequence(2, priority=0))
    scheduler.add(make_sequence(3, priority=0))
    order = []
    while scheduler.has_work():
        order += ends(run_step(scheduler))
    assert [request_id for request_id, _ in order] == [2, 3, 1]


def test_a_dropped_plan_is_planned_again_from_the_same_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 6))
    dropped = shape(scheduler.plan())
    usage = scheduler.load().kv_usage
    assert shape(scheduler.plan()) == dropped
    assert scheduler.load().kv_usage == usage


def test_a_dropped_plan_cannot_be_applied() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    dropped = scheduler.plan()
    scheduler.plan()
    with pytest.raises(AssertionError, match="dropped"):
        scheduler.apply(dropped, sample_for(dropped), 0.0)


def test_the_end_token_ends_a_sequence_and_is_not_part_of_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    run_step(scheduler, 50)
    (output,) = run_step(scheduler, EOS)
    assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.STOP)
    assert (output.stop_token_id, output.first_position) == (EOS, 1)
    assert not scheduler.has_work()


def test_ignore_eos_goes_past_the_models_end_token_but_not_past_the_callers() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, ignore_eos=True, stop_token_ids=(60,)))
    assert run_step(scheduler, EOS)[0].new_token_ids == [EOS]
    assert run_step(scheduler, 60)[0].stop_token_id == 60


def test_a_stop_token_before_min_tokens_is_a_token_like_any_other() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, min_tokens=2))
    assert [run_step(scheduler, EOS)[0].new_token_ids for _ in range(2)] == [[EOS], [EOS]]
    assert run_step(scheduler, EOS)[0].finish_reason is FinishReason.STOP


def test_max_tokens_counts_earlier_attempts() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, output_token_ids=(7, 8), max_tokens=3))
    (output,) = run_step(scheduler)
    assert (output.first_position, output.new_token_ids) == (2, [50])
    assert output.finish_reason is FinishReason.LENGTH


def test_a_resumed_sequence_computes_prompt_and_output_again_and_goes_on_behind_them() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 3, output_token_ids=(7, 8)))
    assert shape(scheduler.plan()) == [(1, 0, 5, True)]
    assert run_step(scheduler)[0].first_position == 2
    assert run_step(scheduler)[0].first_position == 3


@pytest.mark.parametrize("num_prompt_tokens", [1, 10, 64])
def test_a_prompt_that_is_only_scored_runs_to_its_end_and_draws_nothing(num_prompt_tokens: int) -> None:
    scheduler = make_scheduler(num_tokens=8)
    scheduler.add(make_sequence(1, num_prompt_tokens, max_tokens=0, num_prompt_logprobs=0))
    told = Logprobs(0, b"1234" * (num_prompt_tokens - 1))
    outputs: list[EngineCoreOutput] = []
    while scheduler.has_work():
        plan = scheduler.plan()
        samples = [Sample(50, prompt_logprobs=told) for chunk in plan.chunks if chunk.samples]
        outputs += scheduler.apply(plan, samples, 0.0).get(CLIENT, [])
    (output,) = outputs
    assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.LENGTH)
    assert (output.prompt_logprobs, output.queue_time_s) == (told, 0.0)
    load = scheduler.load()
    assert (load.num_prompt_tokens, load.num_generation_tokens, load.kv_usage) == (num_prompt_tokens, 0, 0)
    assert load.num_steps == -(-num_prompt_tokens // 8)


def test_a_prompt_without_anything_to_score_or_draw_ends_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, max_tokens=0))
    assert run_step(scheduler)[0].finish_reason is FinishReason.LENGTH
    assert scheduler.load().num_steps == 0


def test_a_sequence_resumed_with_nothing_left_to_produce_ends_with_length() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, output_token_ids=(7, 8, 9), max_tokens=3))
    (output,) = run_step(scheduler)
    assert (output.finish_reason, output.first_position) == (FinishReason.LENGTH, 3)


def test_max_model_len_ends_a_sequence_with_length() -> None:
    scheduler = make_scheduler(max_model_len=6)
    scheduler.add(make_sequence(1, 4, max_tokens=100))
    assert run_step(scheduler)[0].finish_reason is None
    assert run_step(scheduler)[0].finish_reason is FinishReason.LENGTH


def test_a_sequence_that_fills_the_whole_pool_ends_with_length() -> None:
    scheduler = make_scheduler(num_blocks=2)
    scheduler.add(make_sequence(1, 5, max_tokens=100))
    outputs = []
    while scheduler.has_work():
        outputs += run_step(scheduler)
    assert len(outputs) == 3
    assert ends(outputs) == [(1, FinishReason.LENGTH)]


def test_an_error_of_one_sample_ends_that_sequence_alone() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    scheduler.add(make_sequence(2))
    odd = Sample(0, "no logits", error_kind=ErrorKind.REQUEST)
    outputs = scheduler.apply(scheduler.plan(), [odd, Sample(50)], 0.0)[CLIENT]
    assert (outputs[0].finish_reason, outputs[0].error) == (FinishReason.ERROR, "no logits")
    assert outputs[0].error_kind is ErrorKind.REQUEST
    assert outputs[1].new_token_ids == [50]
    assert scheduler.load().num_running == 1


def test_an_abort_between_steps_frees_at_once_and_is_told_with_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    run_step(scheduler)
    scheduler.abort((1, 0), attempt=0)
    assert scheduler.load().kv_usage == 0
    assert ends(run_step(scheduler)) == [(1, FinishReason.ABORT)]
    assert not scheduler.has_work()


def test_an_abort_between_plan_and_apply_keeps_the_blocks_until_apply() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    plan = scheduler.plan()
    scheduler.abort((1, 0), attempt=0)
    assert scheduler.load().kv_usage > 0
    outputs = scheduler.apply(plan, sample_for(plan), 0.0)[CLIENT]
    assert ends(outputs) == [(1, FinishReason.ABORT)]
    assert outputs[0].new_token_ids == []
    assert scheduler.load().kv_usage == 0


def test_an_abort_between_plan_and_the_next_plan_takes_the_sequence_out() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    scheduler.plan()
    scheduler.abort((1, 0), attempt=0)
    assert shape(scheduler.plan()) == []


def test_an_abort_of_another_attempt_or_of_nobody_changes_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, attempt=1))
    scheduler.abort((1, 0), attempt=0)
    scheduler.abort((9, 0), attempt=0)
    assert run_step(scheduler)[0].new_token_ids == [50]


def test_a_newer_attempt_replaces_the_older_and_a_repetition_is_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, attempt=0))
    run_step(scheduler)
    scheduler.add(make_sequence(1, attempt=1, output_token_ids=(50,)))
    scheduler.add(make_sequence(1, attempt=1))
    outputs = run_step(scheduler)
    assert [(o.attempt, o.finish_reason) for o in outputs] == [(0, FinishReason.ABORT), (1, None)]
    assert outputs[1].first_position == 1


def test_a_newer_attempt_that_comes_between_plan_and_apply_does_not_take_the_older_ones_sample() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, attempt=0))
    plan = scheduler.plan()
    scheduler.add(make_sequence(1, attempt=1))
    outputs = scheduler.apply(plan, sample_for(plan), 0.0)[CLIENT]
    assert [(o.attempt, o.finish_reason) for o in outputs] == [(0, FinishReason.ABORT)]
    assert run_step(scheduler)[0].attempt == 1


def test_a_freed_client_hears_nothing_more_and_the_others_go_on() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    scheduler.add(make_sequence(2, client_id=OTHER_CLIENT))
    plan = scheduler.plan()
    scheduler.abort((1, 0), attempt=0)
    scheduler.free_client(CLIENT)
    outputs = scheduler.apply(plan, sample_for(plan), 0.0)
    assert set(outputs) == {OTHER_CLIENT}
    assert scheduler.load().num_running == 1


def test_when_blocks_run_out_the_youngest_is_preempted_and_later_goes_on_where_it_was() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence(1, 4, max_tokens=6))
    scheduler.add(make_sequence(2, 3, max_tokens=6))
    positions: dict[int, list[int]] = {1: [], 2: []}
    while scheduler.has_work():
        for output in run_step(scheduler):
            positions[output.request_id].append(output.first_position)
    assert positions == {1: [0, 1, 2, 3, 4, 5], 2: [0, 1, 2, 3, 4, 5]}


def test_preemption_prefers_the_worse_priority_over_the_younger() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence(1, 4, max_tokens=20, priority=1))
    scheduler.add(make_sequence(2, 4, max_tokens=20, priority=0))
    while scheduler.load().num_preemptions == 0:
        plan = scheduler.plan()
        scheduler.apply(plan, sample_for(plan), 0.0)
    assert {c.sequence.request_id for c in scheduler.plan().chunks} == {2}


def test_a_new_request_waits_until_those_running_have_room_to_grow() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence(1, 8, max_tokens=2))
    run_step(scheduler)
    scheduler.add(make_sequence(2, 8, max_tokens=2))
    assert [c.sequence.request_id for c in scheduler.plan().chunks] == [1]


def test_queue_time_comes_with_the_first_tokens_alone() -> None:
    scheduler = make_scheduler(num_tokens=4)
    scheduler.add(make_sequence(1, 6, received_at=10.0))
    assert run_step(scheduler, now=10.5) == []
    assert run_step(scheduler, now=11.0)[0].queue_time_s == pytest.approx(0.5)
    assert run_step(scheduler, now=12.0)[0].queue_time_s is None


def test_the_load_counts_what_happened() -> None:
    scheduler = make_scheduler(num_seqs=1)
    scheduler.add(make_sequence(1, 5))
    scheduler.add(make_sequence(2, 7))
    run_step(scheduler)
    load = scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (1, 1, 7)
    assert (load.num_steps, load.num_prompt_tokens, load.num_generation_tokens) == (1, 5, 1)
    assert load.kv_usage == pytest.approx(2 / 64)


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(0, 1), (1, 0)])
def test_bounds_that_let_nothing_run_are_refused(num_seqs: int, num_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_scheduler(num_seqs, num_tokens)
