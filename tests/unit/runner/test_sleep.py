"""A runner that sleeps gives its memory back, and goes on as before when it wakes up."""

import logging
from pathlib import Path

import psutil
import pytest
from transformers import LlamaConfig

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.core.native import NativeCore
from engine.runner.torch_runner import TorchRunner, free_memory
from tests.unit.engine.builders import CLIENT, make_request
from tests.unit.runner.driver import Driver
from tests.unit.runner.families import save_family, save_model

MB = 1 << 20
NUM_SEQUENCES, NUM_TOKENS = 4, 2_000


def start(folder: Path, scheduler: SchedulerConfig) -> TorchRunner:
    return TorchRunner(ModelConfig(model=str(folder), dtype="float32"), scheduler, lambda what, share: None)


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def test_memory_falls_with_the_level_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """96 MB of weights, 32 MB of cache that was used; half of each must be seen to go."""
    # The record of its warning would keep a traceback, which keeps the loading frame, which keeps the model.
    monkeypatch.setattr(logging.getLogger("engine.runner.grammar"), "disabled", True)
    config = LlamaConfig(
        vocab_size=48_000,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2_048,
    )
    save_model(config, tmp_path)
    runner = start(tmp_path, SchedulerConfig(max_num_seqs=NUM_SEQUENCES, kv_cache_memory_bytes=64 * MB))
    driver = Driver(runner)
    prompts = [[index + 5] * NUM_TOKENS for index in range(NUM_SEQUENCES)]
    before = driver.generate([driver.add(prompt) for prompt in prompts], 2, chunk=256)
    free_memory("cpu")  # what saving and loading left behind is not what is measured
    awake = rss()
    runner.sleep(1)
    light = rss()
    assert awake - light > 16 * MB
    runner.sleep(2)
    assert light - rss() > 48 * MB
    seen: list[str] = []
    runner.wake_up(lambda what, share: seen.append(what))
    assert any("Loading weights" in what for what in seen)
    driver = Driver(runner)
    assert driver.generate([driver.add(prompt) for prompt in prompts], 2, chunk=256) == before
    runner.close()


@pytest.mark.parametrize("level", [1, 2])
def test_streams_cut_by_a_sleep_go_on_exactly(level: int, tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    scheduler = SchedulerConfig(block_size=4, max_num_seqs=4, kv_cache_memory_bytes=8 * MB)

    def tokens(sleep_after: int | None) -> dict[int, list[int]]:
        core = NativeCore(scheduler, start(tmp_path, scheduler))
        for request_id in (1, 2, 3):
            core.add_request(make_request(request_id, (7, 8, request_id), max_tokens=12, ignore_eos=True), 0.0)
        found: dict[int, list[int]] = {1: [], 2: [], 3: []}
        step = 0
        while core.has_work():
            if step == sleep_after:
                core.sleep(level)
                core.wake_up(lambda what, share: None)
            for output in core.step(0.0).get(CLIENT, []):
                found[output.request_id] += output.new_token_ids
            step += 1
        core.close()
        return found

    whole = tokens(None)
    assert [len(each) for each in whole.values()] == [12, 12, 12]
    assert tokens(5) == whole
