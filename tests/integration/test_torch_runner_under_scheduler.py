"""The real scheduler over the real runner: the tokens of transformers through batching, preemption and prefix reuse."""

from pathlib import Path

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.core.native import NativeCore
from engine.runner.torch_runner import TorchRunner
from engine.wire.ids import ClientId
from engine.wire.messages import AddRequest, FinishReason
from engine.wire.sampling import SamplingParams
from tests.unit.runner.families import generate, save_family

CLIENT = ClientId(0, 1)
NUM_TOKENS = 24
LENGTHS = (3, 30, 17, 8, 30, 1)


def prompts() -> list[list[int]]:
    return [[(7 * i + 3 * j) % 190 + 5 for j in range(length)] for i, length in enumerate(LENGTHS)]


def request(request_id: int, prompt: list[int]) -> AddRequest:
    return AddRequest(
        client_id=CLIENT,
        channel_seq=request_id,
        request_id=request_id,
        sample_index=0,
        attempt=0,
        prompt_token_ids=prompt,
        output_token_ids=[],
        sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    )


def run(core: NativeCore, asked: list[list[int]]) -> list[list[int]]:
    answers: dict[int, list[int]] = {}
    for request_id, prompt in enumerate(asked, start=1):
        core.add_request(request(request_id, prompt), received_at=0.0)
    num_finished = 0
    while core.has_work():
        for output in core.step(now=0.0).get(CLIENT, []):
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
            num_finished += output.finish_reason is FinishReason.LENGTH
    assert num_finished == len(asked)
    return [answers[request_id] for request_id in sorted(answers)]


def test_tokens_survive_preemption_and_prefix_reuse(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    # Room for 88 tokens, while all requests together want 230: some lose their blocks and start over.
    scheduler = SchedulerConfig(
        block_size=4, max_num_seqs=5, max_num_batched_tokens=20, kv_cache_memory_bytes=88 * 2 * 2 * 2 * 16 * 4
    )
    runner = TorchRunner(
        ModelConfig(model=str(tmp_path), dtype="float32", max_model_len=64), scheduler, lambda what, share: None
    )
    core = NativeCore(scheduler, runner)
    expected = generate(tmp_path, prompts(), NUM_TOKENS)
    assert run(core, prompts()) == expected
    assert core.load().num_preemptions > 0
    assert run(core, prompts()[::-1]) == expected[::-1], "with prefixes from the cache"
    core.close()
