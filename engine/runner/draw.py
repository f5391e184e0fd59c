"""Draws one token per row from the filtered distribution, with one number per row.

A draw inverts the cumulative distribution in vocabulary order. So what a row draws depends on its own scores,
parameters and number only: not on what shares the batch, and not on how a sort breaks ties.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from engine.runner.filters import Filters, is_filtered
from engine.wire.sampling import SamplingParams

_BLOCK = 256

_WIDTHS = (64, 1024, 8192)
"""Best tokens looked at first. Sorting a whole vocabulary costs more than a step of a small model, and only a row whose
mass is spread wider than this needs it."""


def draw(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], numbers: torch.Tensor
) -> torch.Tensor:
    """Return one token per row [R] of float32 ``logits`` [R, V], which are left with other content.

    best: [R], row maxima. numbers: [R], float64 in [0, 1). A row that holds no numbers gives any token.
    """
    device = logits.device
    temperatures = torch.tensor([p.temperature for p in params], device=device)
    scores = logits.sub_(best[:, None]).div_(temperatures[:, None])  # the best token scores 0 at any temperature
    filtered = [row for row, p in enumerate(params) if is_filtered(p)]
    if not filtered:
        return _draw_from_all(scores.exp_(), numbers)
    if len(filtered) == len(params):
        return _draw_filtered(scores, params, numbers)
    tokens = torch.empty(len(params), dtype=torch.int64, device=device)
    index = torch.tensor(filtered, device=device)
    others = torch.tensor([row for row, p in enumerate(params) if not is_filtered(p)], device=device)
    tokens[index] = _draw_filtered(scores[index], [params[row] for row in filtered], numbers[index])
    tokens[others] = _draw_from_all(scores[others].exp_(), numbers[others])
    return tokens


def _draw_from_all(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
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


def _draw_filtered(scores: torch.Tensor, params: Sequence[SamplingParams], numbers: torch.Tensor) -> torch.Tensor:
    """Draw from what the filters leave of ``scores`` [R, V], looking at as few of the best tokens as settle it."""
    vocab_size = scores.shape[1]
    filters = Filters.of(params, vocab_size, scores.device)
    mass = _mass(scores, params)
    tokens = torch.zeros(len(params), dtype=torch.int64, device=scores.device)
    pending = torch.arange(len(params), device=scores.device)
    for width in (w for w in _WIDTHS if w < vocab_size):
        best, ids = (scores if len(pending) == len(scores) else scores[pending]).topk(width, dim=-1)
        cut, holds = filters.select(pending).cut(best, mass[pending])
        settled = pending[holds]
        tokens[settled] = _draw_kept(best[holds], ids[holds], cut[holds], numbers[settled])
        pending = pending[~holds]
        if not pending.numel():
            return tokens
    rest = scores[pending]
    cut, _ = filters.select(pending).cut(rest.sort(dim=-1, descending=True).values, mass[pending])
    tokens[pending] = _draw_from_all(rest.exp().masked_fill_(rest < cut[:, None], 0.0), numbers[pending])
    return tokens


def _draw_kept(best: torch.Tensor, ids: torch.Tensor, cut: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw from the tokens ``ids`` [R, W] whose scores ``best`` [R, W] reach the cut."""
    ids, order = ids.sort(dim=-1)
    weights = best.exp().masked_fill_(best < cut[:, None], 0.0).gather(1, order)
    return ids.gather(1, _invert(weights, numbers)[:, None]).squeeze(1)


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the first index whose running sum exceeds that share [R] of the whole; it has a weight above zero."""
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    whole = running[:, -1]
    targets = torch.minimum(numbers.clamp(min=0.0) * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    found = torch.searchsorted(running, targets[:, None], right=True).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)


def _mass(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the sum of all weights of each row [R], infinite where only top-p without top-k would ask for it."""
    mass = torch.full((len(params),), torch.inf, dtype=torch.float64, device=scores.device)
    rows = [row for row, p in enumerate(params) if p.top_p < 1.0 and not 0 < p.top_k < scores.shape[1]]
    if rows:
        index = torch.tensor(rows, device=scores.device)
        weights = (scores if len(rows) == len(params) else scores[index]).exp()
        mass[index] = _blocks(weights).sum(dim=-1).sum(dim=-1, dtype=torch.float64)
    return mass


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """Return [R, V] as [R, blocks, block], padded with zeros."""
    missing = -weights.shape[1] % _BLOCK
    return (pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, _BLOCK)
