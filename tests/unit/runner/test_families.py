"""Every family gives the tokens that transformers gives, whatever the chunks and whatever shares the batch."""

import random
from pathlib import Path

import pytest

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.runner.torch_runner import TorchRunner
from tests.unit.runner.driver import Driver
from tests.unit.runner.families import FAMILIES, VOCAB_SIZE, generate, save_family

NUM_TOKENS = 16
SCHEDULER = SchedulerConfig(block_size=4, max_num_seqs=8, kv_cache_memory_bytes=8 << 20)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 4, 11, 23, 40)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    expected = generate(tmp_path, prompts(), NUM_TOKENS)
    assert len({token for output in expected for token in output}) > NUM_TOKENS, "the model repeats itself"
    runner = TorchRunner(ModelConfig(model=str(tmp_path), dtype="float32"), SCHEDULER, lambda what, share: None)
    for chunk in (1, 7, 64):
        driver = Driver(runner)
        sequences = [driver.add(prompt) for prompt in prompts()]
        assert driver.generate(sequences, NUM_TOKENS, chunk) == expected, f"chunks of {chunk}"
    assert _staggered(Driver(runner)) == expected
    runner.close()


def _staggered(driver: Driver) -> list[list[int]]:
    """Start one sequence every third step and put the newest first, so that prefill chunks precede decode tokens."""
    sequences = [driver.add(prompt) for prompt in prompts()]
    num_steps = 0
    while True:
        started = sequences[: num_steps // 3 + 1]
        running = [s for s in reversed(started) if s.num_output_tokens < NUM_TOKENS]
        if not running and len(started) == len(sequences):
            return [s.token_ids[s.num_prompt_tokens :] for s in sequences]
        driver.step([(sequence, 7) for sequence in running])
        num_steps += 1
