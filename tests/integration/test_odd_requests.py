"""A request that cannot be run fails alone, before or inside the step, and the engine goes on."""

from pathlib import Path

import pytest

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.core.native import NativeCore
from engine.runner.torch_runner import TorchRunner
from engine.wire.messages import AddRequest, EngineCoreOutput, FinishReason
from engine.wire.sampling import SamplingParams
from tests.integration.exactness import CLIENT
from tests.unit.runner.families import VOCAB_SIZE, generate, poison_embedding, save_family

POISON = 5
PROMPT = [11, 12, 13, 14]
NUM_TOKENS = 6


@pytest.fixture
def core(tmp_path: Path) -> NativeCore:
    save_family("llama", tmp_path)
    poison_embedding(tmp_path, POISON)
    scheduler = SchedulerConfig(block_size=4, max_num_seqs=4, kv_cache_memory_bytes=1 << 20)
    config = ModelConfig(model=str(tmp_path), dtype="float32")
    return NativeCore(scheduler, TorchRunner(config, scheduler, lambda what, share: None))


def request(request_id: int, prompt: list[int], output: list[int] | None = None) -> AddRequest:
    return AddRequest(
        client_id=CLIENT,
        channel_seq=request_id,
        request_id=request_id,
        sample_index=0,
        attempt=0,
        prompt_token_ids=prompt,
        output_token_ids=output or [],
        sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    )


def run(core: NativeCore, *requests: AddRequest) -> dict[int, list[EngineCoreOutput]]:
    outputs: dict[int, list[EngineCoreOutput]] = {}
    for asked in requests:
        core.add_request(asked, received_at=0.0)
    while core.has_work():
        for output in core.step(now=0.0).get(CLIENT, []):
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.mark.parametrize("token", [VOCAB_SIZE, 1 << 40, -1])
@pytest.mark.parametrize("where", ["prompt", "output"])
def test_a_token_outside_the_vocabulary_never_reaches_the_model(
    core: NativeCore, tmp_path: Path, token: int, where: str
) -> None:
    odd = request(2, [*PROMPT, token]) if where == "prompt" else request(2, PROMPT, [token])
    outputs = run(core, request(1, PROMPT), odd, request(3, PROMPT))
    (refusal,) = outputs[2]
    assert refusal.finish_reason is FinishReason.ERROR
    assert refusal.error == f"a {where} token id is outside the vocabulary, 0 to {VOCAB_SIZE - 1}"
    _assert_answered(outputs, tmp_path)


def test_the_last_token_of_the_vocabulary_is_served(core: NativeCore) -> None:
    outputs = run(core, request(1, [VOCAB_SIZE - 1, 0]))
    assert outputs[1][-1].finish_reason is FinishReason.LENGTH


def test_logits_that_are_no_numbers_fail_their_own_request(core: NativeCore, tmp_path: Path) -> None:
    outputs = run(core, request(1, PROMPT), request(2, [*PROMPT, POISON]), request(3, PROMPT))
    assert outputs[2][-1].finish_reason is FinishReason.ERROR
    assert "not a number" in str(outputs[2][-1].error)
    _assert_answered(outputs, tmp_path)
    # What the failed one left behind is nobody's beginning.
    again = run(core, request(4, [*PROMPT, 9]))
    assert [token for output in again[4] for token in output.new_token_ids] == generate(
        tmp_path, [[*PROMPT, 9]], NUM_TOKENS
    )[0]


def _assert_answered(outputs: dict[int, list[EngineCoreOutput]], folder: Path) -> None:
    (expected,) = generate(folder, [PROMPT], NUM_TOKENS)
    for request_id in (1, 3):
        assert [token for output in outputs[request_id] for token in output.new_token_ids] == expected
