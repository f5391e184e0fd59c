"""Vectors of whole prompts: the final hidden state of a sequence's last token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.interfaces.plan import Sample, ScheduledChunk
from engine.wire.tensors import Tensor

_NO_VECTOR = "the model produced no valid hidden state for this sequence (not a number)"


class HiddenStates:
    """What the last layer, its norm included, gave in one forward pass. states: [1, T, hidden_size]."""

    def __init__(self) -> None:
        self.states: torch.Tensor | None = None


@contextmanager
def watched(model: Any) -> Iterator[HiddenStates]:
    """Note the final hidden states of the forward pass made inside.

    A hook on the part below the output layer, whatever a family calls it: asking the model for its hidden states would
    keep those of every layer.
    """
    seen = HiddenStates()

    def note(module: Any, args: Any, output: Any) -> None:
        seen.states = output[0]

    handle = model.base_model.register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def pool(states: torch.Tensor, rows: torch.Tensor, chunks: Sequence[ScheduledChunk]) -> list[Sample]:
    """Return one vector for each chunk. rows: [V], where in ``states`` [1, T, hidden_size] the chunks end.

    A vector that is not finite fails its sequence alone.
    """
    vectors = states[0, rows].float()
    lengths = vectors.norm(dim=-1, keepdim=True)
    normalize = torch.tensor([[_normalizes(chunk)] for chunk in chunks], device=vectors.device)
    vectors = torch.where(normalize, vectors / lengths.clamp_min(torch.finfo(torch.float32).tiny), vectors)
    host = torch.cat([vectors, lengths], dim=1).cpu().numpy()
    finite = torch.isfinite(lengths).flatten().tolist()
    size = vectors.shape[1]
    return [
        Sample(0, pooled=Tensor("float32", (size,), host[row, :size].astype("<f4").tobytes()))
        if finite[row]
        else Sample(0, _NO_VECTOR)
        for row in range(len(chunks))
    ]


def _normalizes(chunk: ScheduledChunk) -> bool:
    return chunk.sequence.pooling is not None and chunk.sequence.pooling.normalize
