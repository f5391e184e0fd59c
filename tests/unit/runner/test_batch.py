"""What a step becomes: rows in groups of like length, tables that hold only what is seen, masks only where needed."""

import pytest
import torch

from engine.interfaces.plan import ScheduledChunk, SequenceState, StepPlan
from engine.runner.batch import StepBatch, make_batch
from engine.wire.ids import ClientId
from engine.wire.sampling import SamplingParams

BLOCK_SIZE = 4
PADDING = 99
CPU = torch.device("cpu")
FLOAT = torch.float32


def chunk(start: int, num_tokens: int = 1, *, first_block: int = 0) -> ScheduledChunk:
    """Return a chunk of a sequence whose token at position p is p, in blocks that follow each other."""
    end = start + num_tokens
    sequence = SequenceState(
        client_id=ClientId(0, 1),
        request_id=first_block,
        sample_index=0,
        attempt=0,
        sampling=SamplingParams(max_tokens=9),
        token_ids=list(range(end)),
        num_prompt_tokens=end,
        received_at=0.0,
        block_table=list(range(first_block, first_block + end // BLOCK_SIZE + 2)),
    )
    return ScheduledChunk(sequence, start, num_tokens, True)


def batch(*chunks: ScheduledChunk) -> StepBatch:
    return make_batch(StepPlan(chunks), BLOCK_SIZE, PADDING, CPU)


def test_rows_are_one_token_chunks_by_length_then_longer_chunks() -> None:
    made = batch(chunk(2, first_block=10), chunk(4, 3, first_block=20), chunk(9, first_block=30))
    assert made.input_ids.tolist() == [[9, 2, 4, 5, 6]]
    assert made.position_ids.tolist() == made.input_ids.tolist()
    assert made.slots.tolist() == [129, 42, 84, 85, 86]
    assert made.kept_rows.tolist() == [1, 4, 0], "in plan order"


@pytest.mark.parametrize("longest", [1, 5, 40, 600])
def test_decode_groups_cover_all_rows_and_waste_little(longest: int) -> None:
    starts = [longest * i // 32 for i in range(33)]
    made = batch(*(chunk(start, first_block=1000 * i) for i, start in enumerate(starts)))
    rows = [row for group in made.decodes for row in range(group.rows.start, group.rows.stop)]
    assert rows == list(range(33))
    assert sorted(position for group in made.decodes for position in group.positions) == starts
    needed = sum(start // BLOCK_SIZE + 1 for start in starts)
    gathered = sum(len(group.view(None, FLOAT).blocks) for group in made.decodes)
    assert gathered <= 1.25 * needed + 33
    assert len(made.decodes) <= 12


def test_shorter_rows_are_padded_and_masked() -> None:
    (group,) = batch(chunk(6, first_block=10), chunk(1, first_block=20)).decodes
    view = group.view(None, FLOAT)
    assert view.blocks.view(2, -1).tolist() == [[10, 11], [20, PADDING]]
    assert view.num_keys == 7
    assert view.mask is not None
    assert view.mask.shape == (2, 1, 1, 7)
    assert view.mask.isfinite().sum(dim=-1).flatten().tolist() == [7, 2]


def test_rows_of_one_length_need_no_mask() -> None:
    (group,) = batch(chunk(6), chunk(6, first_block=20)).decodes
    assert group.view(None, FLOAT).mask is None
    assert group.view(7, FLOAT).mask is None
    assert group.view(6, FLOAT).mask is not None


def test_a_window_leaves_out_the_blocks_before_it() -> None:
    (group,) = batch(chunk(18, first_block=10), chunk(17, first_block=20)).decodes
    view = group.view(5, FLOAT)
    # Positions 14 to 18 and 13 to 17: both begin in the fourth block.
    assert view.blocks.view(2, -1).tolist() == [[13, 14], [23, 24]]
    assert view.mask is not None
    visible = view.mask[:, 0, 0].isfinite()
    assert [row.nonzero().flatten().tolist() for row in visible] == [[2, 3, 4, 5, 6], [1, 2, 3, 4, 5]]


def test_a_beginning_needs_a_mask_only_where_it_is_not_just_causal() -> None:
    (made,) = batch(chunk(0, 6)).prefills
    assert made.view(None, FLOAT, implies_causality=True).mask is None
    assert made.view(6, FLOAT, implies_causality=True).mask is None
    assert made.view(5, FLOAT, implies_causality=True).mask is not None
    causal = made.view(None, FLOAT, implies_causality=False).mask
    assert causal is not None
    assert causal.isfinite().equal(torch.ones(6, 6, dtype=torch.bool).tril())


def test_a_later_chunk_sees_its_past_within_the_window() -> None:
    (made,) = batch(chunk(10, 3, first_block=50)).prefills
    view = made.view(4, FLOAT, implies_causality=True)
    assert (view.blocks.tolist(), view.num_keys) == ([51, 52, 53], 9)
    assert view.mask is not None
    visible = [(row.nonzero().flatten() + 4).tolist() for row in view.mask.isfinite()]
    assert visible == [[7, 8, 9, 10], [8, 9, 10, 11], [9, 10, 11, 12]]


def test_views_are_made_once() -> None:
    (group,) = batch(chunk(6)).decodes
    assert group.view(None, FLOAT) is group.view(None, FLOAT)
    assert group.view(None, FLOAT).matrix_rows(2, 100).tolist() == [0, 1, 100, 101]
    assert group.view(None, FLOAT).matrix_rows(2, 100) is group.view(None, FLOAT).matrix_rows(2, 100)
