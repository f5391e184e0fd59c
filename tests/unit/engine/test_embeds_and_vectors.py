"""Prompts of embeddings and pooled sequences, as the scheduler and the engine's validation see them."""

import struct
from typing import Any

import pytest

from engine.config.engine_config import SchedulerConfig, SimConfig
from engine.core.native import NativeCore
from engine.scheduler.prefix_cache import chain_start
from engine.sim.runner import SimRunner
from engine.wire.messages import AddRequest, EngineCoreOutput, FinishReason
from engine.wire.sampling import PoolingParams
from engine.wire.tensors import Tensor
from tests.unit.engine.builders import CLIENT, make_limits, make_request
from tests.unit.engine.fixed_runner import FixedRunner

HIDDEN = 2
SIM = SimConfig(step_s=0.0, prefill_s_per_token=0.0, num_kv_tokens=64, hidden_size=HIDDEN)


def tensor(num_rows: int, fill: float = 1.0, dtype: str = "float32", hidden: int = HIDDEN) -> Tensor:
    letter = {"float32": "f", "float16": "e", "float64": "d"}[dtype]
    return Tensor(dtype, (num_rows, hidden), struct.pack(f"<{num_rows * hidden}{letter}", *[fill] * num_rows * hidden))


def make_core(num_step_tokens: int = 64, *, num_seqs: int = 8, sim: SimConfig = SIM) -> NativeCore:
    scheduler = SchedulerConfig(max_num_batched_tokens=num_step_tokens, max_num_seqs=num_seqs, block_size=4)
    return NativeCore(scheduler, SimRunner(sim, scheduler))


def ask(core: NativeCore, *requests: AddRequest) -> dict[int, EngineCoreOutput]:
    """Return the end of each request, with all its tokens."""
    for request in requests:
        core.add_request(request, received_at=0.0)
    tokens: dict[int, list[int]] = {}
    ends: dict[int, EngineCoreOutput] = {}
    while core.has_work():
        for output in core.step(0.0).get(CLIENT, []):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output
    for request_id, end in ends.items():
        end.new_token_ids = tokens[request_id]
    return ends


def embedded(embeds: Tensor, request_id: int = 1, **changes: Any) -> AddRequest:
    request = make_request(request_id, (0,) * embeds.shape[0], **changes)
    request.prompt_embeds = embeds
    return request


def to_pool(prompt: tuple[int, ...] = (5, 6, 7), request_id: int = 1, **changes: Any) -> AddRequest:
    request = make_request(request_id, prompt, **({"max_tokens": 0} | changes))
    request.pooling = PoolingParams()
    return request


# --- embeddings -----------------------------------------------------------------------------------------------------


def test_equal_embeddings_share_blocks_and_others_do_not() -> None:
    core = make_core()
    first, second, other = tensor(9), tensor(9), tensor(9, 2.0)
    tokens = make_request(4, (0,) * 9)
    salted = embedded(tensor(9), 5)
    salted.cache_salt = "mine"
    ask(core, embedded(first))
    for request in (embedded(other, 3), tokens, salted):
        ask(core, request)
        assert core.load().num_prefix_hit_tokens == 0
    ask(core, embedded(second, 2))
    assert core.load().num_prefix_hit_tokens == 8


def test_the_name_of_embeddings_covers_all_that_tells_them_apart() -> None:
    data = bytes(range(16))
    prompts = [
        None,
        Tensor("float32", (2, 2), data),
        Tensor("float32", (1, 4), data),
        Tensor("float16", (4, 2), data),
        Tensor("float32", (2, 2), bytes(16)),
    ]
    names = {chain_start(salt, prompt) for salt in (None, "", "a") for prompt in prompts}
    assert len(names) == 3 * len(prompts)
    assert chain_start("a", prompts[1]) == chain_start("a", Tensor("float32", (2, 2), bytearray(data)))


def test_embeddings_survive_chunks_preemption_and_resumption() -> None:
    whole = ask(make_core(), embedded(tensor(9), max_tokens=12))[1].new_token_ids
    tight = make_core(2, num_seqs=4, sim=SimConfig(step_s=0.0, num_kv_tokens=28, hidden_size=HIDDEN))
    others = [make_request(request_id, (5, 6, 7), max_tokens=20) for request_id in (2, 3)]
    assert ask(tight, *others, embedded(tensor(9), max_tokens=12))[1].new_token_ids == whole
    assert tight.load().num_preemptions > 0
    resumed = embedded(tensor(9), max_tokens=12, output_token_ids=tuple(whole[:5]))
    assert ask(make_core(), resumed)[1].new_token_ids == whole[5:]


@pytest.mark.parametrize(
    ("embeds", "changes", "words"),
    [
        (tensor(3, dtype="float64"), {}, "float32, float16, bfloat16"),
        (tensor(3, hidden=3), {}, r"\[3, 3\].*\[3, 2\]"),
        (Tensor("float32", (6,), bytes(24)), {"prompt": (0,) * 6}, r"\[6\].*\[6, 2\]"),
        (tensor(3), {"prompt": (0,) * 4}, r"\[3, 2\].*\[4, 2\]"),
        (tensor(3), {"num_prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_embeddings_that_cannot_be_end_alone(embeds: Tensor, changes: dict[str, Any], words: str) -> None:
    request = make_request(1, changes.pop("prompt", (0,) * embeds.shape[0]), **changes)
    request.prompt_embeds = embeds
    runner = FixedRunner(
        make_limits(hidden_size=HIDDEN, features=frozenset({"prompt_embeds", "pooling", "logprobs"})),
    )
    assert refusal(runner, request, words)


def test_an_engine_without_the_feature_says_so() -> None:
    runner = FixedRunner(make_limits(hidden_size=HIDDEN))
    assert refusal(runner, embedded(tensor(3)), "tokens only")
    assert refusal(runner, to_pool(), "hidden states")


def refusal(runner: FixedRunner, request: AddRequest, words: str) -> bool:
    ends = ask(NativeCore(SchedulerConfig(), runner), make_request(2, max_tokens=1), request)
    assert ends[2].finish_reason is FinishReason.LENGTH
    assert ends[1].finish_reason is FinishReason.ERROR
    with pytest.raises(ValueError, match=words):
        raise ValueError(ends[1].error)
    return True


# --- vectors --------------------------------------------------------------------------------------------------------


def test_a_pooled_sequence_ends_with_its_vector_and_no_token() -> None:
    core = make_core()
    end = ask(core, to_pool())[1]
    assert (end.finish_reason, end.new_token_ids, end.stop_token_id) == (FinishReason.STOP, [], None)
    assert end.pooled is not None
    assert (end.pooled.dtype, end.pooled.shape) == ("float32", (HIDDEN,))
    x, y = struct.unpack("<2f", end.pooled.data)
    assert x * x + y * y == pytest.approx(1.0)
    load = core.load()
    assert (load.num_prompt_tokens, load.num_generation_tokens) == (3, 0)
    assert load.kv_usage == 0.0
    assert end.queue_time_s == 0.0


def test_a_vector_depends_on_the_prompt_alone() -> None:
    alone = ask(make_core(), to_pool(tuple(range(20))))[1].pooled
    busy = make_core(3)
    others = [make_request(2, (9, 9), max_tokens=9), to_pool((1, 2, 3), 3), to_pool(tuple(range(20)), 4, seed=8)]
    ends = ask(busy, *others, to_pool(tuple(range(20))))
    assert ends[1].pooled == ends[4].pooled == alone
    assert ends[3].pooled != alone
    assert len(ends[2].new_token_ids) == 9


def test_a_vector_may_be_left_as_it_is() -> None:
    request = to_pool()
    request.pooling = PoolingParams(normalize=False)
    found = ask(make_core(), request)[1].pooled
    assert found is not None
    assert found != ask(make_core(), to_pool())[1].pooled


def test_a_prompt_that_was_pooled_is_found_in_the_cache_but_for_its_last_token() -> None:
    core = make_core()
    ask(core, to_pool(tuple(range(8))))
    end = ask(core, to_pool(tuple(range(8))))[1]
    assert end.num_cached_tokens == 4
    assert end.pooled is not None


def test_a_pooled_prompt_may_be_as_long_as_the_model() -> None:
    core = make_core()
    assert core.limits.max_model_len == 64
    ends = ask(core, to_pool((5,) * 64), to_pool((5,) * 65, 2))
    assert ends[1].pooled is not None
    assert "64 tokens" in (ends[2].error or "")


def test_embeddings_are_pooled_too() -> None:
    request = to_pool((0,) * 3)
    request.prompt_embeds = tensor(3)
    other = to_pool((0,) * 3, 2)
    ends = ask(make_core(), request, other)
    assert ends[1].pooled is not None
    assert ends[1].pooled != ends[2].pooled


def test_a_pooled_sequence_that_fails_fails_alone() -> None:
    core = make_core(sim=SimConfig(step_s=0.0, hidden_size=HIDDEN, fail_on_token=9))
    ends = ask(core, to_pool((9,)), to_pool((5,), 2))
    assert ends[1].finish_reason is FinishReason.ERROR
    assert ends[2].pooled is not None


def test_a_pooled_sequence_has_no_output_to_go_on_with() -> None:
    assert "no output tokens" in (ask(make_core(), to_pool(output_token_ids=(5,), max_tokens=4))[1].error or "")


def test_a_pooled_sequence_is_aborted_like_any_other() -> None:
    core = make_core(1)
    core.add_request(to_pool(), received_at=0.0)
    core.step(0.0)
    core.abort_requests([((1, 0), 0)])
    (output,) = core.step(0.0)[CLIENT]
    assert (output.finish_reason, output.pooled) == (FinishReason.ABORT, None)
    assert not core.has_work()
