"""How much memory the KV cache takes, on which device, and what is said when it cannot be."""

import pytest
import torch

from engine.config.engine_config import SchedulerConfig
from engine.runner.kv_cache import LayerShape, allocate_cache, count_blocks, memory_bytes
from engine.wire.errors import StartupError

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")
SHAPES = [LayerShape(num_kv_heads=2, key_dim=8, value_dim=4, dtype=torch.float32)] * 3
BLOCK_BYTES = 4 * 3 * 2 * (8 + 4) * 4


@pytest.fixture
def free_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a GPU is there: what is tested runs on machines without one."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {CUDA: (1000, 4000)}[device])


def test_a_size_that_is_given_is_taken_on_any_device(free_gpu: None) -> None:
    config = SchedulerConfig(kv_cache_memory_bytes=123)
    assert memory_bytes(config, CPU) == memory_bytes(config, CUDA) == 123


def test_by_default_a_gpu_gives_a_share_of_what_is_free_and_a_cpu_a_fixed_size(free_gpu: None) -> None:
    assert memory_bytes(SchedulerConfig(), CUDA) == 900
    assert memory_bytes(SchedulerConfig(kv_cache_memory_fraction=0.5), CUDA) == 500
    assert memory_bytes(SchedulerConfig(), CPU) == 512 << 20


@pytest.mark.parametrize(("memory", "num_blocks"), [(5 * BLOCK_BYTES, 5), (6 * BLOCK_BYTES - 1, 5), (1 << 40, 10)])
def test_blocks_fill_the_memory_but_no_more_than_can_be_in_use(memory: int, num_blocks: int) -> None:
    config = SchedulerConfig(block_size=4, max_num_seqs=2)
    assert count_blocks(SHAPES, config, max_model_len=20, memory=memory) == num_blocks


def test_too_little_memory_for_one_sequence_is_refused_with_the_size_that_would_do() -> None:
    config = SchedulerConfig(block_size=4)
    with pytest.raises(StartupError, match=f"raise kv_cache_memory_bytes to {5 * BLOCK_BYTES} or lower max_model_len"):
        count_blocks(SHAPES, config, max_model_len=20, memory=5 * BLOCK_BYTES - 1)


def test_memory_that_the_device_has_not_is_one_clear_line() -> None:
    config = SchedulerConfig(block_size=4, max_num_seqs=1 << 40, kv_cache_memory_bytes=1 << 60)
    with pytest.raises(StartupError, match=r"cpu lacks the .* bytes .*; lower kv_cache_memory_bytes") as refusal:
        allocate_cache(SHAPES, config, 20, CPU)
    assert "\n" not in str(refusal.value)


def test_the_cache_has_the_blocks_counted() -> None:
    config = SchedulerConfig(block_size=4, max_num_seqs=2, kv_cache_memory_bytes=7 * BLOCK_BYTES)
    assert allocate_cache(SHAPES, config, 20, CPU).num_blocks == 7
