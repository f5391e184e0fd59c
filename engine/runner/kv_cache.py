"""Keys and values of all sequences in one pool of blocks, so that no sequence needs contiguous memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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

    Heads come first, so that what is gathered for a sequence is contiguous per head: attention over it is up to a third
    faster on a CPU. The last block is padding: nobody writes it, so it stays zero. Memory that no sequence has written
    yet must stay finite too, because attention multiplies masked values by zero, and zero times not-a-number is not a
    number; see ``clear``. Layers of equal shape lie in one tensor, so that ``clear`` is one call for all of them.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate; raises ``RuntimeError`` when the device has not that much memory."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.padding_block = num_blocks
        self._pools: list[torch.Tensor] = []
        self._keys: list[torch.Tensor] = [torch.empty(0)] * len(shapes)
        self._values: list[torch.Tensor] = [torch.empty(0)] * len(shapes)
        for shape in dict.fromkeys(shapes):
            layers = [layer for layer, own in enumerate(shapes) if own == shape]
            sizes = (len(layers), shape.num_kv_heads, num_blocks + 1, block_size)
            keys = torch.zeros(*sizes, shape.key_dim, dtype=shape.dtype, device=device)
            values = torch.zeros(*sizes, shape.value_dim, dtype=shape.dtype, device=device)
            self._pools += [keys, values]
            for index, layer in enumerate(layers):
                self._keys[layer], self._values[layer] = keys[index], values[index]

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys [num_kv_heads, T, key_dim] and values at ``slots`` [T]; return the layer's two pools.

        A slot is ``block * block_size + offset``.
        """
        key_pool, value_pool = self._keys[layer], self._values[layer]
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
