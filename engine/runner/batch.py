"""Turns a step's ragged chunks into the flat tensors of one forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.interfaces.plan import ScheduledChunk, StepPlan
from engine.runner.embeds import GivenEmbeds, given_embeds
from engine.runner.keys import DecodeGroup, PrefillChunk, to_device
from engine.runner.logprobs import scored_positions

_LEAST_FILLED = 0.75
"""A row that needs less of its group's width than this begins the next group. Measured on a CPU, where padding costs as
much as keys, and one more group as much as a dozen blocks of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One flattened forward pass over T tokens; all tensors on the device.

    input_ids, position_ids: [1, T]. slots: [T], where each token's key and value go.
    kept_rows: [S + P], the rows whose scores are wanted: the last one of each chunk that draws, then those of
        ``scored_positions`` of each chunk, both in plan order.
    pooled_rows: [V], the last row of each chunk that yields a vector, in plan order; None when none does.
    embeds: the rows whose embeddings are given, and what they are; None when all are tokens'.
    begun_blocks: [B], blocks of which this step writes the beginning but not the end.
    decodes, prefills: who attends to what; together they cover the rows in order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    kept_rows: torch.Tensor
    pooled_rows: torch.Tensor | None
    embeds: GivenEmbeds | None
    begun_blocks: torch.Tensor
    decodes: Sequence[DecodeGroup]
    prefills: Sequence[PrefillChunk]


def make_batch(plan: StepPlan, block_size: int, padding_block: int, device: torch.device) -> StepBatch:
    """Lay out a step: chunks of one token first, the longest past leading, whatever their place in the plan."""
    decoding = sorted((c for c in plan.chunks if c.num_tokens == 1), key=lambda c: c.start // block_size, reverse=True)
    prefilling = [chunk for chunk in plan.chunks if chunk.num_tokens > 1]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_row: dict[int, int] = {}
    chunks = (*decoding, *prefilling)
    for chunk in chunks:
        end = chunk.start + chunk.num_tokens
        table = chunk.sequence.block_table
        tokens += chunk.sequence.token_ids[chunk.start : end]
        positions += range(chunk.start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(chunk.start, end)]
        last_row[id(chunk)] = len(tokens) - 1
    return StepBatch(
        input_ids=to_device(tokens, device)[None],
        position_ids=to_device(positions, device)[None],
        slots=to_device(slots, device),
        kept_rows=to_device(_kept_rows(plan.chunks, last_row), device),
        pooled_rows=_pooled_rows(plan.chunks, last_row, device),
        embeds=given_embeds(chunks, device),
        begun_blocks=to_device(_begun_blocks(plan.chunks, block_size), device),
        decodes=list(_decode_groups(decoding, block_size, padding_block, device)),
        prefills=list(_prefill_chunks(prefilling, len(decoding), block_size, device)),
    )


def _kept_rows(chunks: Sequence[ScheduledChunk], last_row: dict[int, int]) -> list[int]:
    sampled = [last_row[id(chunk)] for chunk in chunks if chunk.draws]
    for chunk in chunks:
        first = last_row[id(chunk)] - chunk.num_tokens + 1
        sampled += [first + position - chunk.start for position in scored_positions(chunk)]
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
        if row < len(chunks) and widths[row] >= widths[first] * _LEAST_FILLED - 1:
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
    begun = []
    for chunk in chunks:
        end = chunk.start + chunk.num_tokens
        first_position = end // block_size * block_size
        if chunk.start <= first_position < end:
            begun.append(chunk.sequence.block_table[end // block_size])
    return begun
