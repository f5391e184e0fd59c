"""The native core: requests in, checked, stepped and answered; on a runner that computes nothing."""

import math
from collections.abc import Callable

import pytest

from engine.config.engine_config import SchedulerConfig
from engine.core.native import NativeCore
from engine.wire.errors import UnknownMethodError
from engine.wire.messages import AddRequest, EngineCoreOutput, ErrorKind, FinishReason
from tests.unit.engine.builders import CLIENT, make_limits, make_request
from tests.unit.engine.fixed_runner import FixedRunner


def make_core(error: Exception | None = None, **limits: int) -> tuple[NativeCore, FixedRunner]:
    runner = FixedRunner(make_limits(**limits), error)
    return NativeCore(SchedulerConfig(), runner), runner


def step(core: NativeCore) -> list[EngineCoreOutput]:
    return core.step(0.0).get(CLIENT, [])


def test_a_request_runs_to_its_end() -> None:
    core, _ = make_core()
    core.add_request(make_request(max_tokens=2), received_at=0.0)
    tokens = []
    while core.has_work():
        tokens += [token for output in step(core) for token in output.new_token_ids]
    assert tokens == [50, 50]


def test_a_resumed_request_goes_on_behind_its_output() -> None:
    core, _ = make_core()
    core.add_request(make_request(max_tokens=4, output_token_ids=(9, 9, 9)), received_at=0.0)
    (output,) = step(core)
    assert (output.first_position, output.finish_reason) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request(prompt=()), "prompt is empty"),
        (make_request(prompt=(1,) * 64), "max_model_len"),
        (make_request(prompt=(1,) * 65, max_tokens=0), "max_model_len"),
        (make_request(prompt=(5, 256)), "0 to 255"),
        (make_request(prompt=(-1, 5)), "0 to 255"),
        (make_request(output_token_ids=(256,)), "output token id"),
        (make_request(max_tokens=-1), "max_tokens"),
        (make_request(temperature=math.nan), "temperature"),
        (make_request(temperature=-1.0), "temperature"),
        (make_request(top_p=0.0), "top_p"),
        (make_request(min_p=2.0), "min_p"),
        (make_request(top_k=-1), "top_k"),
    ],
)
def test_an_impossible_request_ends_alone_with_the_limit_it_breaks(request_: AddRequest, words: str) -> None:
    core, runner = make_core()
    core.add_request(make_request(request_id=2), received_at=0.0)
    core.add_request(request_, received_at=0.0)
    outputs = {output.request_id: output for output in step(core)}
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert words in (outputs[1].error or "")
    assert outputs[1].error_kind is ErrorKind.REQUEST
    assert outputs[2].new_token_ids == [50]
    assert runner.num_runs == 1


def test_a_prompt_that_never_fits_the_cache_is_told_so() -> None:
    core, _ = make_core(num_blocks=2)
    core.add_request(make_request(prompt=(5,) * 8), received_at=0.0)
    assert "the 8 tokens the KV cache holds" in (step(core)[0].error or "")
    assert core.limits.max_model_len == 8


def test_what_the_runner_raises_is_the_engines_death() -> None:
    core, _ = make_core(error=RuntimeError("device lost"))
    core.add_request(make_request(), received_at=0.0)
    with pytest.raises(RuntimeError, match="device lost"):
        core.step(0.0)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda core: core.abort_requests([((1, 0), 0)]), FinishReason.ABORT),
        (lambda core: core.scheduler.give_back_all(), FinishReason.REROUTE),
    ],
)
def test_a_request_that_is_aborted_or_given_back_leaves_without_a_run(
    end: Callable[[NativeCore], None], reason: FinishReason
) -> None:
    core, runner = make_core()
    core.add_request(make_request(), received_at=0.0)
    end(core)
    assert [output.finish_reason for output in step(core)] == [reason]
    assert runner.num_runs == 0
    assert not core.has_work()


def test_a_freed_client_leaves_nothing_to_do() -> None:
    core, _ = make_core()
    core.add_request(make_request(), received_at=0.0)
    core.add_request(make_request(request_id=2, prompt=()), received_at=0.0)
    core.scheduler.free_client(CLIENT)
    assert not core.has_work()


def test_the_load_between_plan_and_run_shows_who_runs() -> None:
    core, runner = make_core()
    core.add_request(make_request(), received_at=0.0)
    seen = []
    core.step(0.0, on_planned=lambda: seen.append((core.load().num_running, core.load().num_waiting, runner.num_runs)))
    assert seen == [(1, 0, 0)]


def test_a_stalled_client_is_no_work_until_it_takes_again() -> None:
    core, _ = make_core()
    core.add_request(make_request(), received_at=0.0)
    core.scheduler.stall_client(CLIENT)
    assert not core.has_work()
    core.scheduler.resume_client(CLIENT)
    assert step(core)[0].new_token_ids == [50]


def test_a_salt_keeps_requests_out_of_each_others_cache() -> None:
    core, _ = make_core()
    cached = []
    for request_id, salt in enumerate((None, "a", "a", "b", None)):
        request = make_request(request_id, prompt=(5,) * 10, max_tokens=1)
        request.cache_salt = salt
        core.add_request(request, received_at=0.0)
        cached.append(step(core)[0].num_cached_tokens)
    assert cached == [0, 0, 8, 0, 8]
    assert core.call("reset_prefix_cache", []) is True


def test_utilities_are_a_closed_list() -> None:
    core, _ = make_core()
    assert core.call("echo", ["hello"]) == "hello"
    assert core.call("get_load", [])["num_running"] == 0
    assert core.call("statistics", [])["num_kv_tokens"] == 256
    assert core.call("collective_rpc", ["echo", None, ["hello"], {}]) == "hello"
    assert core.call("collective_rpc", ["echo", None, [], {"value": "hello"}]) == "hello"
    with pytest.raises(UnknownMethodError, match=r"'collective_rpc'; there are echo, "):
        core.call("collective_rpc", ["collective_rpc", None, [], {}])
    with pytest.raises(
        UnknownMethodError, match=r"'__init__'; there are collective_rpc, echo, get_load, reset_prefix_cache"
    ):
        core.call("__init__", [])


def test_closing_frees_the_device() -> None:
    core, runner = make_core()
    core.close()
    assert runner.is_closed
