"""Chooses the next token of every sampling row: greedy, or one draw from the filtered distribution.

The choice for a row depends on its own logits, parameters and randomness only, never on what shares the batch: filters
are cuts by value (so ties do not depend on a sorting order), and the draw inverts the cumulative distribution in
vocabulary order with one number per row.
"""

from collections.abc import Sequence

import torch

from engine.runner.filters import lowest_kept
from engine.runner.philox import uniforms
from engine.scheduler.plan import Sample, SequenceState

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy; dividing by them would overflow."""

_NOT_A_NUMBER = "the model produced no valid probabilities for this sequence (not a number)"


def sample(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> list[Sample]:
    """Choose one token for each row of ``logits`` [num_sequences, vocabulary], any float type.

    A row without a finite maximum fails alone, with a sentence in its sample.
    """
    if not sequences:
        return []
    logits = logits.float()  # comparing in bfloat16 is slower and ties more
    best, tokens = logits.max(dim=-1)
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature >= _GREEDY_BELOW]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        drawn = _draw(logits[index], best[index], [sequences[row] for row in rows])
        tokens = tokens.index_copy(0, index, drawn)
    token_ids, valid = torch.stack([tokens, best.isfinite().long()]).tolist()  # the step's only wait for the device
    return [Sample(token_id) if ok else Sample(0, _NOT_A_NUMBER) for token_id, ok in zip(token_ids, valid, strict=True)]


def _draw(logits: torch.Tensor, best: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
    """Draw one token per row of float32 ``logits`` [R, V] with row maxima ``best`` [R]."""
    params = [sequence.sampling for sequence in sequences]
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device)
    scores = (logits - best[:, None]) / temperatures[:, None]  # the best token scores 0 at any temperature
    cut = lowest_kept(scores, params)
    weights = scores.exp().masked_fill_(scores < cut[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    numbers = uniforms([(s.sampling.seed, s.sample_index, s.num_output_tokens) for s in sequences])
    targets = torch.from_numpy(numbers).to(logits.device)[:, None] * cumulative[:, -1:]
    # The first token whose cumulative weight exceeds the target; such a token has a weight above zero.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
