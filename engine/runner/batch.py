"""The flat tensors of one forward pass, laid out from the ragged chunks of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike

from engine.interfaces.plan import ScheduledChunk, StepPlan
from engine.runner.attention_metadata import DecodeGroup, PrefillChunk, to_device
from engine.runner.logprobs import prompt_logprob_positions
from engine.wire.tensors import Tensor

_MIN_FILL = 0.75
"""A row that needs less of its group's width than this begins the next group. Measured on a CPU, where padding costs as
much as keys, and one more group as much as a dozen blocks of them."""

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NUMPY_DTYPES: dict[str, DTypeLike] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<i2"}
"""What numpy reads each format as: it has no bfloat16, so that one passes through as whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbeds:
    """Embeddings that requests brought in place of prompt tokens, as far as a step computes them.

    rows: [G], where in the step. values: one [g, hidden_size] per chunk that has some, together G rows.
    """

    rows: torch.Tensor
    values: Sequence[torch.Tensor]

    def overwrite(self, embeds: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [1, T, hidden_size] of a step's tokens, with these in place of their rows."""
        own = torch.cat([value.to(embeds.device, embeds.dtype) for value in self.values])
        return embeds.index_copy(1, self.rows, own[None])  # not in place: it may be a view of the embedding table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One flattened forward pass over T tokens; all tensors on the device.

    input_ids, position_ids: [1, T]. slots: [T], where each token's key and value go.
    kept_rows: [S + P], the rows whose logits are computed: the last one of each chunk that draws, then those of
        ``prompt_logprob_positions`` of each chunk, both in plan order.
    pooled_rows: [V], the last row of each chunk that yields a vector, in plan order; None when none does.
    embeds: the rows that have embeddings of their own; None when all rows are tokens.
    begun_blocks: [B], blocks of which this step writes the beginning but not the end.
    decodes, prefills: which keys the rows attend to; together they cover the rows in order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    kept_rows: torch.Tensor
    pooled_rows: torch.Tensor | None
    embeds: PromptEmbeds | None
    begun_blocks: torch.Tensor
    decodes: Sequence[DecodeGroup]
    prefills: Sequence[PrefillChunk]


def make_batch(plan: StepPlan, block_size: int, padding_block: int, device: torch.device) -> StepBatch:
    """Lay out a step: chunks of one token first, the longest past leading, whatever their place in the plan."""
    # Sorted by length, so that neighbours fit into one decode group with little padding.
    decoding = sorted((c for c in plan.chunks if c.num_tokens == 1), key=lambda c: c.start // block_size, reverse=True)
    prefilling = [chunk for chunk in plan.chunks if chunk.num_tokens > 1]
    chunks = (*decoding, *prefilling)
    rows = _flatten(chunks, block_size)
    return StepBatch(
        input_ids=to_device(rows.tokens, device)[None],
        position_ids=to_device(rows.positions, device)[None],
        slots=to_device(rows.slots, device),
        kept_rows=to_device(_kept_rows(plan.chunks, rows.last_row), device),
        pooled_rows=_pooled_rows(plan.chunks, rows.last_row, device),
        embeds=collect_embeds(chunks, device),
        begun_blocks=to_device(_begun_blocks(plan.chunks, block_size), device),
        decodes=list(_decode_groups(decoding, block_size, padding_block, device)),
        prefills=list(_prefill_chunks(prefilling, len(decoding), block_size, device)),
    )


class _FlatRows(NamedTuple):
    """The rows of some chunks behind each other. last_row: of each chunk, by the chunk's ``id``."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    last_row: dict[int, int]


def _flatten(chunks: Sequence[ScheduledChunk], block_size: int) -> _FlatRows:
    rows = _FlatRows([], [], [], {})
    tokens, positions, slots, last_row = rows
    for chunk in chunks:
        end = chunk.start + chunk.num_tokens
        table = chunk.sequence.block_table
        tokens += chunk.sequence.token_ids[chunk.start : end]
        positions += range(chunk.start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(chunk.start, end)]
        last_row[id(chunk)] = len(tokens) - 1
    return rows


def _kept_rows(chunks: Sequence[ScheduledChunk], last_row: dict[int, int]) -> list[int]:
    sampled = [last_row[id(chunk)] for chunk in chunks if chunk.draws]
    for chunk in chunks:
        first = last_row[id(chunk)] - chunk.num_tokens + 1
        sampled += [first + position - chunk.start for position in prompt_logprob_positions(chunk)]
    return sampled


def _pooled_rows(
    chunks: Sequence[ScheduledChunk], last_row: dict[int, int], device: torch.device
) -> torch.Tensor | None:
    pooled = [last_row[id(chunk)] for chunk in chunks if chunk.pools]
    return to_device(pooled, device) if pooled else None


def _decode_groups(
    chunks: Sequence[ScheduledChunk], block_size: int, padding_block: int, device: torch.device
) -> Iterator[DecodeGroup]:
    """Cut the rows, sorted by the length of their past, where padding would cost more than another group does."""
    widths = [chunk.start // block_size + 1 for chunk in chunks]
    first = 0
    for row in range(1, len(chunks) + 1):
        if row < len(chunks) and widths[row] >= widths[first] * _MIN_FILL - 1:
            continue
        members = range(first, row)
        yield DecodeGroup(
            rows=slice(first, row),
            positions=[chunks[member].start for member in members],
            tables=[chunks[member].sequence.block_table[: widths[member]] for member in members],
            block_size=block_size,
            padding_block=padding_block,
            device=device,
        )
        first = row


def _prefill_chunks(
    chunks: Sequence[ScheduledChunk], first_row: int, block_size: int, device: torch.device
) -> Iterator[PrefillChunk]:
    for chunk in chunks:
        num_blocks = -(-(chunk.start + chunk.num_tokens) // block_size)
        yield PrefillChunk(
            rows=slice(first_row, first_row + chunk.num_tokens),
            start=chunk.start,
            table=chunk.sequence.block_table[:num_blocks],
            block_size=block_size,
            device=device,
        )
        first_row += chunk.num_tokens


def _begun_blocks(chunks: Sequence[ScheduledChunk], block_size: int) -> list[int]:
    """Return the blocks to clear before the step: see ``PagedKVCache.clear``."""
    begun = []
    for chunk in chunks:
        end = chunk.start + chunk.num_tokens
        first_position = end // block_size * block_size
        if chunk.start <= first_position < end:
            begun.append(chunk.sequence.block_table[end // block_size])
    return begun


def collect_embeds(chunks: Sequence[ScheduledChunk], device: torch.device) -> PromptEmbeds | None:
    """Collect the embeddings of chunks that lie behind each other in the step; None when none has any."""
    rows: list[int] = []
    values: list[torch.Tensor] = []
    first_row = 0
    for chunk in chunks:
        embeds = chunk.sequence.prompt_embeds
        if embeds is not None:
            # A chunk may reach beyond the prompt: after a preemption the output is computed again with it.
            end = min(chunk.start + chunk.num_tokens, embeds.shape[0])
            if chunk.start < end:
                rows += range(first_row, first_row + end - chunk.start)
                values.append(_rows_of(embeds, chunk.start, end))
        first_row += chunk.num_tokens
    return PromptEmbeds(rows=to_device(rows, device), values=values) if rows else None


def _rows_of(embeds: Tensor, start: int, end: int) -> torch.Tensor:
    matrix = np.frombuffer(embeds.data, _NUMPY_DTYPES[embeds.dtype]).reshape(embeds.shape)
    # Copied: what came over the wire is read-only, which torch cannot express.
    return torch.from_numpy(matrix[start:end].copy()).view(_TORCH_DTYPES[embeds.dtype])
