"""Offline use over sim engines in this process."""

import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.wire.errors import EngineDeadError, EngineError, InvalidRequestError, StartupError
from orchestrator.llm.offline import LLM, offline_config, offline_options
from orchestrator.llm.params import GenerationParams
from orchestrator.llm.request_output import RequestOutput

FAIL, CRASH = 254, 255


def make_llm(**options: Any) -> LLM:
    defaults: dict[str, Any] = {"engine": "sim", "sim_step_ms": 0.5, "max_num_seqs": 4, "progress": False}
    return LLM(**(defaults | {"sim_fail_on_token": FAIL, "sim_crash_on_token": CRASH} | options))


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "llm" or thread.name.startswith("engine")]


def wait_busy(llm: LLM) -> None:
    while not llm.statistics()["in_flight"]:
        threading.Event().wait(0.005)


def interrupt_main_when_busy(llm: LLM) -> None:
    wait_busy(llm)
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm(data_parallel_size=2) as made:
        yield made


def generate(llm: LLM, prompts: Any, **params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, GenerationParams(**({"max_tokens": 6, "seed": 1} | params)), progress=False)


def test_outputs_come_in_the_order_of_the_prompts_whatever_their_lengths(llm: LLM) -> None:
    prompts = [f"prompt {index}" for index in range(40)]
    lengths = [1 + (index * 7) % 30 for index in range(40)]
    params = [GenerationParams(max_tokens=length, seed=1) for length in lengths]
    outputs = llm.generate(prompts, params, progress=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_an_output_says_what_went_in_what_came_out_and_how_long_it_took(llm: LLM) -> None:
    (output,) = generate(llm, "hello")
    (sample,) = output.outputs
    assert (output.prompt, output.prompt_token_ids) == ("hello", list(b"hello"))
    assert (sample.index, sample.finish_reason, output.error) == (0, "length", None)
    assert sample.text == bytes(sample.token_ids).decode()
    assert output.metrics is not None
    assert output.metrics.queue_time_s is not None
    assert output.metrics.ttft_s is not None
    assert 0 <= output.metrics.queue_time_s <= output.metrics.ttft_s <= output.metrics.e2e_s


def test_the_same_prompt_gives_the_same_text_as_text_or_as_ids_alone_or_among_others(llm: LLM) -> None:
    (alone,) = generate(llm, "hello")
    (as_ids,) = generate(llm, list(b"hello"))
    among = generate(llm, ["x", list(b"hello"), "y"])[1]
    assert as_ids.prompt is None
    assert alone.outputs == as_ids.outputs == among.outputs


def test_each_sample_of_a_prompt_has_its_index_and_its_own_text(llm: LLM) -> None:
    (output,) = generate(llm, "hello", n=3)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert len({sample.text for sample in output.outputs}) == 3


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = generate(llm, "hello", max_tokens=30)
    text = whole.outputs[0].text
    (output,) = generate(llm, "hello", max_tokens=30, stop=(text[10:13],))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == text[: text.index(text[10:13])]


def test_a_prompt_that_fails_fails_alone(llm: LLM) -> None:
    outputs = generate(llm, ["good", [FAIL], [999], "", "x" * 9_000, "also good"])
    assert [type(output.error) for output in outputs] == [
        type(None),
        EngineError,
        InvalidRequestError,
        InvalidRequestError,
        InvalidRequestError,
        type(None),
    ]
    assert [sample.finish_reason for sample in outputs[1].outputs] == ["error"]
    assert outputs[4].outputs == []
    assert outputs[4].metrics is None


def test_chat_takes_one_conversation_or_several_and_applies_the_template(llm: LLM) -> None:
    hello, bye = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]
    params = GenerationParams(max_tokens=4, seed=1)
    (one,) = llm.chat(hello, params, progress=False)
    assert one.prompt == "user: hello\nassistant: "
    both = llm.chat([bye, hello], params, progress=False)
    assert both[1].outputs == one.outputs
    assert both[0].prompt == "user: bye\nassistant: "


def test_prompts_share_cached_blocks_only_under_the_same_salt() -> None:
    prompt = "a beginning that fills several blocks of the prefix cache"
    with make_llm() as llm:
        cached = [generate(llm, prompt, cache_salt=salt)[0].num_cached_tokens for salt in ("mine", "yours", None)]
        again = [generate(llm, prompt, cache_salt=salt)[0].num_cached_tokens for salt in ("mine", "yours", None)]
    assert cached == [0, 0, 0]
    assert min(again) > 0


def test_a_priority_or_a_salt_that_cannot_travel_fails_its_prompt_alone(llm: LLM) -> None:
    params = [GenerationParams(max_tokens=2, **fields) for fields in ({"cache_salt": ""}, {"priority": 1 << 70}, {})]
    outputs = llm.generate(["a", "b", "c"], params, progress=False)
    assert [type(output.error) for output in outputs] == [InvalidRequestError, InvalidRequestError, type(None)]


def test_nothing_asked_is_nothing_answered(llm: LLM) -> None:
    assert llm.generate([], progress=False) == []
    assert llm.chat([], progress=False) == []


def test_params_are_for_all_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(ValueError, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [GenerationParams()])
    with pytest.raises(TypeError, match="prompt 1 is a NoneType"):
        llm.generate(["a", None])


def test_vectors_come_in_the_order_of_the_prompts_and_a_failing_one_fails_alone(llm: LLM) -> None:
    prompts: list[Any] = [f"prompt {index}" for index in range(20)]
    outputs = llm.embed([*prompts, [FAIL], []], progress=False)
    assert [output.prompt for output in outputs] == [*prompts, None, None]
    assert len({tuple(output.embedding) for output in outputs[:20]}) == 20
    assert llm.embed(list(b"prompt 3"), progress=False)[0].embedding == outputs[3].embedding
    assert all(output.error is None for output in outputs[:20])
    assert isinstance(outputs[20].error, EngineError)
    assert isinstance(outputs[21].error, InvalidRequestError)
    assert outputs[20].embedding == outputs[21].embedding == []
    with pytest.raises(TypeError, match="prompt 1 is a ndarray; a prompt is a text or token ids"):
        llm.embed(["a", np.ones((2, 32))], progress=False)  # type: ignore[arg-type]


def test_arrays_are_prompts(llm: LLM) -> None:
    rows = np.ones((3, 32), dtype="f4")
    alone = generate(llm, rows)[0]
    mixed = generate(llm, ["hello", rows, rows[:, :5]])
    assert mixed[1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert (alone.prompt, alone.prompt_token_ids) == (None, [])
    assert "number of tokens, 32" in str(mixed[2].error)
    assert mixed[0].error is None


def test_both_ranks_work(llm: LLM) -> None:
    before = [view.num_picks for view in llm.engine_views()]
    generate(llm, ["x"] * 40)
    picks = [view.num_picks - old for view, old in zip(llm.engine_views(), before, strict=True)]
    assert sum(picks) == 40
    assert abs(picks[0] - picks[1]) <= 4


def test_a_rank_can_be_chosen_and_a_wrong_one_is_refused(llm: LLM) -> None:
    good, wrong = llm.generate(
        ["a", "a"],
        [GenerationParams(max_tokens=2, data_parallel_rank=rank) for rank in (1, 7)],
        progress=False,
    )
    assert good.error is None
    assert "valid: 0, 1" in str(wrong.error)


def test_several_threads_may_generate_at_once(llm: LLM) -> None:
    texts: dict[str, str] = {}

    def ask(prompt: str) -> None:
        texts[prompt] = generate(llm, prompt)[0].outputs[0].text

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {name: generate(llm, name)[0].outputs[0].text for name in "abc"}


async def test_it_works_where_an_event_loop_runs(llm: LLM) -> None:
    assert generate(llm, "hello")[0].error is None


def test_progress_is_shown_on_standard_error_or_not_at_all(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GenerationParams(max_tokens=2))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    assert "tokens/s" in shown.err
    generate(llm, ["a", "b"])
    assert capsys.readouterr() == ("", "")


def test_an_engine_that_dies_takes_only_its_own_prompts_and_the_last_one_closes_the_llm() -> None:
    with make_llm(data_parallel_size=2) as llm:
        (dead,) = generate(llm, [[CRASH]], data_parallel_rank=0)
        assert "engine 0.1: SimulatedCrashError" in str(dead.error)
        assert "not tried on the last engine" in str(dead.error)
        assert [output.error for output in generate(llm, ["a"] * 6)] == [None] * 6
        generate(llm, [[CRASH]])
        with pytest.raises(EngineDeadError, match=r"engine 0\.1: .*engine 1\.1: "):
            generate(llm, "a")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt also where the suite runs in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_what_is_interrupted_is_freed_and_the_next_call_works() -> None:
    with make_llm(sim_step_ms=5) as llm:
        interrupter = threading.Thread(target=interrupt_main_when_busy, args=(llm,))
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["a"] * 6, max_tokens=8_000)
        interrupter.join()
        assert generate(llm, "b")[0].error is None
        assert llm.statistics()["in_flight"] == 0


def test_closing_twice_leaves_no_thread_and_later_calls_say_so() -> None:
    llm = make_llm(data_parallel_size=2)
    generate(llm, "a")
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="this LLM is closed"):
        generate(llm, "a")


def test_closing_ends_what_another_thread_generates() -> None:
    llm = make_llm(sim_step_ms=5)
    outputs: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(generate(llm, ["a"] * 2, max_tokens=8_000)))
    thread.start()
    wait_busy(llm)
    llm.close()
    thread.join()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]


def test_an_llm_that_is_dropped_ends_its_threads() -> None:
    before = our_threads()
    llm = make_llm()
    generate(llm, "a")
    del llm
    gc.collect()
    assert our_threads() == before


def test_a_start_that_fails_leaves_no_thread() -> None:
    before = our_threads()
    with pytest.raises(StartupError, match="does not exist"):
        LLM("./no/such/model")
    with pytest.raises(ValueError, match="KV pool"):
        make_llm(sim_num_kv_tokens=16, block_size=64)
    assert our_threads() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_paralel_size": 2}, "unknown option data_paralel_size .did you mean data_parallel_size?"),
        ({"port": 8000}, "port is an option of `shoal serve`"),
        ({"served_model_name": "x"}, "served_model_name is an option of `shoal serve`"),
        ({"data_parallel_size": 0}, "data_parallel_size: must be greater than or equal to 1, not 0"),
        ({"engine": "torch"}, "required with --engine torch"),
    ],
)
def test_knobs_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        offline_config(options)


def test_offline_use_takes_every_knob_of_model_engine_and_scheduler() -> None:
    assert {"model", "dtype", "device", "num_threads", "max_model_len", "kv_cache_memory"} <= offline_options()
    assert {"host", "executor", "run_dir", "log_level"}.isdisjoint(offline_options())
