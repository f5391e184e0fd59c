"""How much memory the KV cache gets, and how many blocks that is."""

from collections.abc import Sequence

import torch

from engine.config.engine_config import SchedulerConfig
from engine.runner.kv_cache import LayerShape, PagedKVCache
from engine.wire.errors import StartupError

_ON_CPU_BYTES = 512 * 1024 * 1024
"""Memory taken on a CPU when none is named: there the rest of the machine wants the free memory too."""


def allocate_cache(
    shapes: Sequence[LayerShape],
    config: SchedulerConfig,
    max_model_len: int,
    device: torch.device,
    reserved_bytes: int = 0,
) -> PagedKVCache:
    """Return a KV cache as large as the configuration wants; to be called when the weights are on the device.

    reserved_bytes: of the free memory, what is not the cache's to share.

    Raises:
        StartupError: it does not hold one sequence of ``max_model_len`` tokens, or the device does not hold it.
    """
    num_blocks = count_blocks(shapes, config, max_model_len, memory_bytes(config, device, reserved_bytes))
    try:
        return PagedKVCache(shapes, num_blocks, config.block_size, device)
    except RuntimeError as error:
        wanted = num_blocks * _bytes_per_block(shapes, config)
        raise StartupError(
            f"{device} lacks the {wanted} bytes for the KV cache; lower kv_cache_memory_bytes, max_num_seqs or "
            "max_model_len"
        ) from error


def memory_bytes(config: SchedulerConfig, device: torch.device, reserved_bytes: int = 0) -> int:
    """Return the bytes to use: as configured, else a share of what is free on a CUDA device, or 512 MiB on a CPU."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type != "cuda":
        return _ON_CPU_BYTES
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(max(0, free_bytes - reserved_bytes) * config.kv_cache_memory_fraction)


def count_blocks(shapes: Sequence[LayerShape], config: SchedulerConfig, max_model_len: int, memory: int) -> int:
    """Return how many blocks to allocate: what ``memory`` bytes hold, and no more than could ever be in use.

    Raises:
        StartupError: the memory does not hold one sequence of ``max_model_len`` tokens.
    """
    bytes_per_block = _bytes_per_block(shapes, config)
    per_sequence = -(-max_model_len // config.block_size)
    affordable = memory // bytes_per_block
    if affordable < per_sequence:
        raise StartupError(
            f"{memory} bytes of KV cache hold {affordable * config.block_size} tokens, less than one sequence of "
            f"max_model_len={max_model_len}; raise kv_cache_memory_bytes to {per_sequence * bytes_per_block} or lower "
            "max_model_len"
        )
    return min(affordable, per_sequence * config.max_num_seqs)


def _bytes_per_block(shapes: Sequence[LayerShape], config: SchedulerConfig) -> int:
    return config.block_size * sum(shape.bytes_per_token for shape in shapes)
