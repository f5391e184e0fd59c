"""The paged KV cache: how many blocks the granted memory holds, and the pools that the blocks lie in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.config.engine_config import SchedulerConfig
from engine.wire.errors import StartupError

_DEFAULT_BYTES_ON_CPU = 512 * 1024 * 1024
"""Memory taken on a CPU when no size is configured: there the rest of the machine needs the free memory too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer keeps per token: ``num_kv_heads`` keys and values of these sizes."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Return the memory of one token in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class PagedKVCache:
    """One pool of keys and one of values per layer, each [num_kv_heads, num_blocks + 1, block_size, dim].

    The last block is padding: nobody writes it, so it stays zero. Memory that no sequence has written yet must stay
    finite too, because attention multiplies masked values by zero, and zero times not-a-number is not a number; see
    ``clear``.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate. shapes: of each layer, in order.

        Raises:
            RuntimeError: the device has not that much memory.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.padding_block = num_blocks
        self._pools: list[torch.Tensor] = []
        layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Layers of equal shape lie in one tensor, so that ``clear`` is one call for all of them.
        for shape in dict.fromkeys(shapes):
            same = [layer for layer, own in enumerate(shapes) if own == shape]
            # Heads first: what is gathered is contiguous per head, and attention up to a third faster on a CPU.
            sizes = (len(same), shape.num_kv_heads, num_blocks + 1, block_size)
            keys = torch.zeros(*sizes, shape.key_dim, dtype=shape.dtype, device=device)
            values = torch.zeros(*sizes, shape.value_dim, dtype=shape.dtype, device=device)
            self._pools += [keys, values]
            layers |= {layer: (keys[index], values[index]) for index, layer in enumerate(same)}
        self._layers = [layers[layer] for layer in range(len(shapes))]

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys [num_kv_heads, T, key_dim] and values at ``slots`` [T]; return the layer's two pools.

        A slot is ``block * block_size + offset``.
        """
        key_pool, value_pool = self._layers[layer]
        key_pool.flatten(1, 2).index_copy_(1, slots, keys)
        value_pool.flatten(1, 2).index_copy_(1, slots, values)
        return key_pool, value_pool

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero whole blocks [B] in every layer.

        To be called for a block that a sequence begins but does not fill: what an earlier owner left behind the new
        tokens could be not-a-number.
        """
        for pool in self._pools:
            pool.index_fill_(2, blocks, 0)


def allocate_cache(
    shapes: Sequence[LayerShape],
    config: SchedulerConfig,
    max_model_len: int,
    device: torch.device,
    reserved_bytes: int = 0,
) -> PagedKVCache:
    """Return a KV cache as large as the configuration allows; to be called when the weights are on the device.

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
        return _DEFAULT_BYTES_ON_CPU
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
    # More than max_num_seqs full sequences can never be in use, however much memory is granted.
    return min(affordable, per_sequence * config.max_num_seqs)


def _bytes_per_block(shapes: Sequence[LayerShape], config: SchedulerConfig) -> int:
    return config.block_size * sum(shape.bytes_per_token for shape in shapes)
