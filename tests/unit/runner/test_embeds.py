"""Rows of given embeddings find their place in a step, in each format, and touch no other row."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.interfaces.plan import ScheduledChunk, SequenceState
from engine.runner.batch import collect_embeds
from engine.wire.ids import ClientId
from engine.wire.sampling import SamplingParams
from engine.wire.tensors import Tensor

CPU = torch.device("cpu")
HIDDEN = 4


def chunk(start: int, num_tokens: int, num_prompt_tokens: int, embeds: Tensor | None) -> ScheduledChunk:
    sequence = SequenceState(
        client_id=ClientId(0, 1),
        request_id=1,
        sample_index=0,
        attempt=0,
        sampling=SamplingParams(max_tokens=9),
        token_ids=[0] * (start + num_tokens),
        num_prompt_tokens=num_prompt_tokens,
        received_at=0.0,
        prompt_embeds=embeds,
    )
    return ScheduledChunk(sequence, start, num_tokens, True)


def matrix(num_rows: int, first: float = 1.0) -> np.ndarray:
    return (first + np.arange(num_rows, dtype="<f4"))[:, None].repeat(HIDDEN, axis=1)


def tensor(rows: np.ndarray) -> Tensor:
    return Tensor("float32", rows.shape, rows.tobytes())


def overwritten(chunks: Sequence[ScheduledChunk]) -> list[float]:
    """Return the first number of each row of a step whose tokens all have embeddings of zeros."""
    given = collect_embeds(chunks, CPU)
    assert given is not None
    zeros = torch.zeros(1, sum(c.num_tokens for c in chunks), HIDDEN)
    rows: list[float] = given.overwrite(zeros)[0, :, 0].tolist()
    assert not zeros.any(), "an embedding table's own rows may be shared"
    return rows


def test_a_step_of_tokens_has_none() -> None:
    assert collect_embeds([chunk(0, 3, 3, None)], CPU) is None


def test_a_step_behind_the_prompt_has_none() -> None:
    assert collect_embeds([chunk(5, 1, 5, tensor(matrix(5)))], CPU) is None


def test_rows_stand_where_their_chunk_stands_and_the_output_keeps_its_tokens() -> None:
    chunks = [
        chunk(7, 1, 4, None),
        chunk(2, 4, 4, tensor(matrix(4))),  # two of the prompt, two of the output: recomputed after a preemption
        chunk(0, 2, 3, None),
        chunk(1, 2, 3, tensor(matrix(3, 10.0))),
    ]
    assert overwritten(chunks) == [0, 3, 4, 0, 0, 0, 0, 11, 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_each_format_is_read_as_it_was_written(dtype: torch.dtype, model_dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows = torch.randn(3, HIDDEN).to(dtype)
    data = rows.view(torch.uint8).numpy().tobytes()  # read-only, like what comes over the wire
    embeds = Tensor(str(dtype).removeprefix("torch."), rows.shape, data)
    given = collect_embeds([chunk(1, 2, 3, embeds)], CPU)
    assert given is not None
    found = given.overwrite(torch.zeros(1, 2, HIDDEN, dtype=model_dtype))
    assert found.dtype is model_dtype
    assert torch.equal(found[0], rows[1:].to(model_dtype))


def test_chunks_of_different_formats_share_a_step() -> None:
    half = Tensor("float16", (1, HIDDEN), np.full((1, HIDDEN), 0.5, dtype="<f2").tobytes())
    assert overwritten([chunk(0, 1, 1, half), chunk(0, 1, 1, tensor(matrix(1)))]) == [0.5, 1.0]
