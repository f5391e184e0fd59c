"""The runner without a model: its tokens are a rule, its time is a model."""

from typing import Any

import pytest

from engine.config.engine_config import SchedulerConfig, SimConfig
from engine.core.native import NativeCore
from engine.interfaces.plan import ScheduledChunk, SequenceState, StepPlan
from engine.sim.runner import SimRunner, SimulatedCrashError, step_duration_s
from engine.sim.tokens import prompt_hash, stream_base, token_at
from tests.unit.engine.builders import CLIENT, make_request, make_sequence

SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, block_size=4)


class StoppedError(Exception):
    """Raised by a fake sleep to get out of a step that never ends."""


def make_core(sleeps: list[float] | None = None, scheduler: SchedulerConfig = SCHEDULER, **sim: Any) -> NativeCore:
    sleep = (sleeps if sleeps is not None else []).append
    return NativeCore(scheduler, SimRunner(SimConfig(**sim), scheduler, sleep=sleep))


def generate(core: NativeCore, **request: Any) -> list[int]:
    core.add_request(make_request(**request), received_at=0.0)
    tokens: list[int] = []
    while core.has_work():
        for output in core.step(0.0).get(CLIENT, []):
            if output.request_id == request.get("request_id", 1):
                tokens += output.new_token_ids
    return tokens


def chunk(sequence: SequenceState, start: int, num_tokens: int) -> ScheduledChunk:
    return ScheduledChunk(sequence, start, num_tokens, start + num_tokens == len(sequence.token_ids))


def test_tokens_are_printable_text_with_spaces() -> None:
    text = bytes(generate(make_core(), max_tokens=400)).decode("ascii")
    assert len(text) == 400
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert " " in text


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_resumed_stream_goes_on_exactly(cut: int) -> None:
    whole = generate(make_core(), max_tokens=20, seed=3)
    rest = generate(make_core(), max_tokens=20, seed=3, output_token_ids=tuple(whole[:cut]))
    assert rest == whole[cut:]


def test_a_stream_does_not_depend_on_batch_chunks_or_preemption() -> None:
    whole = generate(make_core(), max_tokens=20)
    tight = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2, block_size=4)
    core = make_core(scheduler=tight, num_kv_tokens=28)
    for request_id in (2, 3):
        core.add_request(make_request(request_id=request_id, max_tokens=20), received_at=0.0)
    assert generate(core, max_tokens=20) == whole
    assert core.load().num_preemptions > 0


def test_streams_differ_by_seed_sample_and_prompt() -> None:
    bases = {stream_base(prompt_hash(p), seed, i) for p in ([1, 2], [2, 1]) for seed in (0, 1) for i in (0, 1)}
    streams = {bytes(token_at(base, position) for position in range(30)) for base in bases}
    assert len(streams) == 8


def test_the_rule_of_the_tokens_is_frozen() -> None:
    base = stream_base(prompt_hash(list(b"hello")), 7, 0)
    assert bytes(token_at(base, position) for position in range(20)) == b"sycs  g  ua dukcmdbl"


def test_a_step_takes_what_the_timing_model_says() -> None:
    config = SimConfig(step_s=1.0, prefill_s_per_token=0.25, decode_s_per_seq=0.5)
    prefill = make_sequence(1, 6)
    decode = make_sequence(2, 4, output_token_ids=(50,))
    plan = StepPlan([chunk(decode, 4, 1), chunk(prefill, 0, 6)])
    assert step_duration_s(config, plan) == pytest.approx(1.0 + 6 * 0.25 + 0.5)


def test_a_step_sleeps_once_and_a_free_step_not_at_all() -> None:
    sleeps: list[float] = []
    generate(make_core(sleeps, step_s=0.01, prefill_s_per_token=0.0), max_tokens=3)
    generate(make_core(sleeps, step_s=0.0, prefill_s_per_token=0.0), max_tokens=3)
    assert sleeps == [0.01] * 3


def test_loading_takes_its_time_and_says_how_far_it_is() -> None:
    sleeps: list[float] = []
    progress: list[float] = []
    SimRunner(SimConfig(load_s=2.0), SCHEDULER, lambda _, done: progress.append(done), sleeps.append)
    assert sum(sleeps) == pytest.approx(2.0)
    assert progress == sorted(progress)
    assert progress[0] == 0.0


def test_a_failing_request_fails_alone() -> None:
    core = make_core(fail_on_token=99)
    core.add_request(make_request(request_id=1, prompt=(5, 99)), received_at=0.0)
    core.add_request(make_request(request_id=2), received_at=0.0)
    outputs = {output.request_id: output for output in core.step(0.0)[CLIENT]}
    assert "99" in (outputs[1].error or "")
    assert outputs[2].error is None


def test_a_crash_comes_out_of_the_step() -> None:
    with pytest.raises(SimulatedCrashError, match="99"):
        generate(make_core(crash_on_token=99), prompt=(99,))


def test_a_hanging_step_never_ends_by_itself() -> None:
    naps: list[float] = []

    def sleep(duration_s: float) -> None:
        naps.append(duration_s)
        if len(naps) == 3:
            raise StoppedError

    core = NativeCore(SCHEDULER, SimRunner(SimConfig(hang_on_token=99), SCHEDULER, sleep=sleep))
    with pytest.raises(StoppedError):
        generate(core, prompt=(99,))


def test_a_vocabulary_without_letters_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        SimRunner(SimConfig(vocab_size=100), SCHEDULER)
