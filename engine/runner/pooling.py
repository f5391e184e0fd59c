"""Pooling: the vector of a whole prompt is the final hidden state of its last token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine.interfaces.plan import Sample, ScheduledChunk
from engine.wire.tensors import Tensor

_INVALID_STATE = "the model produced no valid hidden state for this sequence (not a number)"


@contextmanager
def capture_hidden_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the final hidden states [1, T, hidden_size] of the forward pass made inside.

    Final means behind the last layer's norm. The list stays empty when the model does not run its ``base_model``.
    """
    captured: list[torch.Tensor] = []

    def capture(module: Any, args: Any, output: Any) -> None:
        captured.append(output[0])

    # A hook on the part below the output layer, which each family names otherwise. ``output_hidden_states`` would keep
    # those of every layer.
    handle = model.base_model.register_forward_hook(capture)
    try:
        yield captured
    finally:
        handle.remove()


def pool(states: torch.Tensor, rows: torch.Tensor, chunks: Sequence[ScheduledChunk]) -> list[Sample]:
    """Return one vector for each chunk. rows: [V], where in ``states`` [1, T, hidden_size] the chunks end.

    A vector that is not finite fails its sequence alone.
    """
    vectors = states[0, rows].float()
    lengths = vectors.norm(dim=-1, keepdim=True)
    normalize = torch.tensor([[_normalizes(chunk)] for chunk in chunks], device=vectors.device)
    # The clamp keeps a vector of zeros from becoming not-a-number.
    vectors = torch.where(normalize, vectors / lengths.clamp_min(torch.finfo(torch.float32).tiny), vectors)
    host = torch.cat([vectors, lengths], dim=1).cpu().numpy()  # one copy from the device for both
    size = vectors.shape[1]
    finite = np.isfinite(host[:, size]).tolist()
    return [
        Sample(0, pooled=Tensor("float32", (size,), host[row, :size].astype("<f4").tobytes()))
        if finite[row]
        else Sample(0, _INVALID_STATE)
        for row in range(len(chunks))
    ]


def _normalizes(chunk: ScheduledChunk) -> bool:
    return chunk.sequence.pooling is not None and chunk.sequence.pooling.normalize
