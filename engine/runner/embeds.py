"""Embeddings that requests bring along instead of tokens, on their way into a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike

from engine.interfaces.plan import ScheduledChunk
from engine.runner.keys import to_device
from engine.wire.tensors import Tensor

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NUMPY_DTYPES: dict[str, DTypeLike] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<i2"}
"""What numpy reads each format as: it has no bfloat16, so that one passes through as whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenEmbeds:
    """rows: [G], where in the step. values: one [g, hidden_size] per chunk that has some, together G rows."""

    rows: torch.Tensor
    values: Sequence[torch.Tensor]

    def overwrite(self, embeds: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [1, T, hidden_size] of a step's tokens, with these in their place."""
        given = torch.cat([value.to(embeds.device, embeds.dtype) for value in self.values])
        return embeds.index_copy(1, self.rows, given[None])


def given_embeds(chunks: Sequence[ScheduledChunk], device: torch.device) -> GivenEmbeds | None:
    """Collect those of the chunks, which lie behind each other in the step; None when there are none."""
    rows: list[int] = []
    values: list[torch.Tensor] = []
    first_row = 0
    for chunk in chunks:
        embeds = chunk.sequence.prompt_embeds
        if embeds is not None:
            end = min(chunk.start + chunk.num_tokens, embeds.shape[0])
            if chunk.start < end:
                rows += range(first_row, first_row + end - chunk.start)
                values.append(_rows_of(embeds, chunk.start, end))
        first_row += chunk.num_tokens
    return GivenEmbeds(rows=to_device(rows, device), values=values) if rows else None


def _rows_of(embeds: Tensor, start: int, end: int) -> torch.Tensor:
    """Copy some rows: what came over the wire is read-only, which torch cannot say of a tensor."""
    matrix = np.frombuffer(embeds.data, _NUMPY_DTYPES[embeds.dtype]).reshape(embeds.shape)
    return torch.from_numpy(matrix[start:end].copy()).view(_TORCH_DTYPES[embeds.dtype])
