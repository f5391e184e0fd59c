"""Exactness of every family: the tokens are those of transformers, whatever the engine does meanwhile.

Chunk sizes, preemption and reuse of beginnings are combined pairwise over the families, not in full.
"""

import itertools
import random
from pathlib import Path

import pytest

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.runner.torch_runner import TorchRunner
from tests.integration.exactness import SmallPool, answer, assert_equal
from tests.unit.runner.families import FAMILIES, VOCAB_SIZE, generate, save_family

NUM_PROMPTS = 64
NUM_TOKENS = 8
BLOCK_SIZE = 4
STEP_TOKENS = (1, 7, 64)
MAX_NUM_SEQS = 6
SMALL_POOL = 11  # blocks: the longest sequence and little more, while six want to run
MIN_PREEMPTIONS = 3  # fewer may also come of turns against starvation


def prompts() -> list[list[int]]:
    """Return prompts of ten lengths; every other one begins like the others before it."""
    rng = random.Random(11)
    lengths = rng.sample(range(1, 28), 10)
    beginning = [rng.randrange(3, VOCAB_SIZE) for _ in range(16)]
    made = []
    for index in range(NUM_PROMPTS):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice(lengths))]
        made.append(own if index % 2 else [*beginning, *own][: len(own)])
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    asked = prompts()
    expected = generate(tmp_path, asked, NUM_TOKENS)
    runner = _start(tmp_path)
    variants = itertools.cycle(itertools.product((False, True), repeat=2))
    for num_step_tokens, (preempting, caching) in zip(
        STEP_TOKENS, itertools.islice(variants, list(FAMILIES).index(family), None), strict=False
    ):
        scheduler = SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=num_step_tokens,
            enable_prefix_caching=caching,
        )
        pool = SmallPool(runner, SMALL_POOL) if preempting else runner
        answers = answer(pool, scheduler, asked, NUM_TOKENS, seed=num_step_tokens)
        assert_equal(answers.tokens, expected, asked, tmp_path)
        assert (answers.load.num_prefix_hit_tokens > 0) == caching
        if preempting and num_step_tokens > 1:  # else one sequence runs at a time, and hardly any competes for blocks
            assert answers.load.num_preemptions >= MIN_PREEMPTIONS
    runner.close()


def _start(folder: Path) -> TorchRunner:
    scheduler = SchedulerConfig(block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, kv_cache_memory_bytes=8 << 20)
    return TorchRunner(ModelConfig(model=str(folder), dtype="float32"), scheduler, lambda what, share: None)
