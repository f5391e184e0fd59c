"""The attention metadata of a step: block tables padded to rectangles, and masks over their positions.

Everything here is made once per step and window, not once per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyView:
    """The keys of R queries that have a sequence each, or of the queries of one sequence (R = 1).

    blocks: [R * W] of the pool. num_keys: how many of the W * block_size positions are attended to.
    mask: [R, 1, 1, num_keys], or [num_queries, num_keys] for one sequence, to be added to the attention scores. None
    when all may be seen; for a sequence of which this is the beginning, None when each query sees itself and those
    before it.
    """

    blocks: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None
    _matrix_rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def matrix_rows(self, num_kv_heads: int, num_blocks: int) -> torch.Tensor:
        """Return [num_kv_heads * R * W], where a pool [num_kv_heads * num_blocks, ...] holds each head's blocks."""
        key = num_kv_heads, num_blocks
        if key not in self._matrix_rows:  # the same for all layers of a shape
            heads = torch.arange(num_kv_heads, device=self.blocks.device) * num_blocks
            self._matrix_rows[key] = (heads[:, None] + self.blocks).flatten()
        return self._matrix_rows[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Chunks of one token whose pasts are about equally long, attended together.

    rows: where they are in the batch. positions: of each. tables: the blocks of each, up to its position.
    """

    rows: slice
    positions: Sequence[int]
    tables: Sequence[Sequence[int]]
    block_size: int
    padding_block: int
    device: torch.device
    views: dict[int | None, KeyView] = field(default_factory=dict)

    def view(self, window: int | None, dtype: torch.dtype) -> KeyView:
        """Return what each row sees: the last ``window`` positions, its own included, or all."""
        if window not in self.views:
            self.views[window] = self._make_view(window, dtype)
        return self.views[window]

    def _make_view(self, window: int | None, dtype: torch.dtype) -> KeyView:
        firsts = [_first_block(position, window, self.block_size) for position in self.positions]
        tables = [table[first:] for table, first in zip(self.tables, firsts, strict=True)]
        width = max(map(len, tables))
        # The padding block is never written and stays zero: a masked key must still be a number.
        blocks = [block for table in tables for block in (*table, *[self.padding_block] * (width - len(table)))]
        queries = [position - first * self.block_size for position, first in zip(self.positions, firsts, strict=True)]
        num_keys = max(queries) + 1
        sees_all = min(queries) + 1 == num_keys and (window is None or num_keys <= window)
        mask = None
        if not sees_all:  # attention without a mask may take a faster kernel
            mask = _additive_mask(to_device(queries, self.device), num_keys, window, dtype)[:, None, None, :]
        return KeyView(blocks=to_device(blocks, self.device), num_keys=num_keys, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A chunk of several tokens of one sequence, attended by itself.

    rows: where its tokens are in the batch. start: position of the first. table: the sequence's blocks up to the last.
    """

    rows: slice
    start: int
    table: Sequence[int]
    block_size: int
    device: torch.device
    views: dict[tuple[int | None, bool], KeyView] = field(default_factory=dict)

    def view(self, window: int | None, dtype: torch.dtype, *, implies_causality: bool) -> KeyView:
        """Return what the chunk sees: each token the last ``window`` positions, its own included, or all.

        implies_causality: attention without a mask lets no query see what comes after it.
        """
        key = window, implies_causality
        if key not in self.views:
            self.views[key] = self._make_view(window, dtype, implies_causality)
        return self.views[key]

    def _make_view(self, window: int | None, dtype: torch.dtype, implies_causality: bool) -> KeyView:
        first = _first_block(self.start, window, self.block_size)
        query = self.start - first * self.block_size
        num_keys = query + self.rows.stop - self.rows.start
        is_plain = self.start == 0 and implies_causality and (window is None or num_keys <= window)
        queries = torch.arange(query, num_keys, device=self.device)
        return KeyView(
            blocks=to_device(self.table[first:], self.device),
            num_keys=num_keys,
            mask=None if is_plain else _additive_mask(queries, num_keys, window, dtype),
        )


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copy whole numbers to the device without making the host wait for it."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")  # a pageable copy would block
    return host.to(device, non_blocking=True)


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """Return the first block that holds a position a query at ``position`` sees."""
    return 0 if window is None else max(0, position + 1 - window) // block_size


def _additive_mask(queries: torch.Tensor, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return [Q, num_keys]: 0 where the query whose own key is at ``queries`` [Q] may attend, minus infinity elsewhere.

    window: a query sees the last ``window`` positions, itself included.
    """
    distance = queries[:, None] - torch.arange(num_keys, device=queries.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    # Not a boolean mask: a float one is 15-30 % faster on a CPU.
    return torch.zeros(hidden.shape, dtype=dtype, device=queries.device).masked_fill_(hidden, -torch.inf)
