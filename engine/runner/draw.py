"""Draws one token per row from the filtered distribution, with one number per row.

A draw inverts the cumulative distribution in vocabulary order. So what a row draws depends on its own scores,
parameters and number only: not on what shares the batch, and not on how a sort breaks ties.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from engine.runner.filters import find_cuts, is_filtered
from engine.wire.sampling import SamplingParams

_BLOCK = 256


def draw(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], numbers: torch.Tensor
) -> torch.Tensor:
    """Return one token per row [R] of float32 ``logits`` [R, V], which are left with other content.

    best: [R], row maxima. numbers: [R], float64 in [0, 1). A row that holds no numbers gives any token.
    """
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device)
    scores = logits.sub_(best[:, None]).div_(temperatures[:, None])  # the best token scores 0 at any temperature
    filtered = [row for row, p in enumerate(params) if is_filtered(p)]
    if not filtered:
        return _draw(scores.exp_(), numbers)
    weights = scores.exp()
    if len(filtered) == len(params):
        _drop(weights, scores, params)
    else:
        index = torch.tensor(filtered, device=logits.device)
        some = weights[index]
        _drop(some, scores[index], [params[row] for row in filtered])
        weights[index] = some
    return _draw(weights, numbers)


def _drop(weights: torch.Tensor, scores: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the weights [R, V] of what the filters drop to zero."""
    mass = _blocks(weights).sum(dim=-1).sum(dim=-1, dtype=torch.float64)
    cuts = find_cuts(scores, mass, params)
    weights.masked_fill_(scores < cuts[:, None], 0.0)


def _draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw from ``weights`` [R, V] in two levels, a block and a token in it: a running sum of V is not needed."""
    blocks = _blocks(weights)
    upto = blocks.sum(dim=-1).double().cumsum(dim=-1)
    targets = numbers * upto[:, -1]
    chosen = torch.searchsorted(upto, targets[:, None], right=True).clamp_(max=upto.shape[1] - 1)
    sums = upto.gather(1, chosen).squeeze(1)
    before = torch.where(chosen.squeeze(1) > 0, upto.gather(1, (chosen - 1).clamp(min=0)).squeeze(1), 0.0)
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    tokens = chosen.squeeze(1) * _BLOCK + _invert(inside, (targets - before) / (sums - before))
    return tokens.clamp_(max=weights.shape[1] - 1)  # only what is not a number leads into the padding


def _invert(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the first index whose running sum exceeds that share [R] of the whole; it has a weight above zero."""
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    whole = running[:, -1]
    targets = torch.minimum(shares.clamp(min=0.0) * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    found = torch.searchsorted(running, targets[:, None], right=True).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """Return [R, V] as [R, blocks, block], padded with zeros."""
    missing = -weights.shape[1] % _BLOCK
    return (pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, _BLOCK)
