"""top-k, top-p and min-p as one cut per row: the lowest score that may still be drawn.

All three keep a prefix of the tokens in descending order, so together they keep the shortest of the three prefixes.
top-p measures mass within what top-k left, as transformers does. Tokens that tie with the last one kept are kept.
"""

from collections.abc import Sequence

import torch

from engine.wire.sampling import SamplingParams

_WIDTHS = (64, 1024)
"""Best tokens looked at first. Sorting a whole vocabulary costs more than a step of a small model, and only a row whose
mass is spread wider than this needs it."""


def lowest_kept(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the cut of each row [R] of ``scores`` [R, V]: log-weights whose maximum is 0 in each row."""
    device, vocabulary = scores.device, scores.shape[1]
    cut = torch.tensor([p.min_p for p in params], device=device).log()
    pending = [row for row, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocabulary]
    for width in (*(w for w in _WIDTHS if w < vocabulary), vocabulary):
        if not pending:
            break
        rows = torch.tensor(pending, device=device)
        found, done = _cut_within(scores[rows], [params[row] for row in pending], width)
        cut[rows] = torch.where(done, torch.maximum(cut[rows], found), cut[rows])
        pending = [row for row, is_done in zip(pending, done.tolist(), strict=True) if not is_done]
    return cut


def _cut_within(
    scores: torch.Tensor, params: Sequence[SamplingParams], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look for the cut among the ``width`` best tokens of each row; return the cuts and whether each one holds.

    Which width settles a row depends on that row alone.
    """
    device, vocabulary = scores.device, scores.shape[1]
    top_k = torch.tensor([p.top_k or vocabulary for p in params], device=device).clamp(max=vocabulary)
    top_p = torch.tensor([p.top_p if p.top_p < 1.0 else torch.inf for p in params], dtype=torch.float64, device=device)
    best = scores.topk(width, dim=-1).values
    in_top_k = torch.arange(width, device=device) < top_k[:, None]
    weights = best.double().exp() * in_top_k
    cumulative = weights.cumsum(dim=-1)
    whole = top_k <= width
    mass = torch.where(whole, cumulative[:, -1], scores.exp().sum(dim=-1, dtype=torch.float64))
    wanted = (top_p * mass)[:, None]
    num_kept = (in_top_k & (cumulative - weights < wanted)).sum(dim=-1)
    reached = (top_k == vocabulary) & (cumulative[:, -1] >= wanted[:, 0])
    found = best.gather(1, (num_kept - 1).clamp(min=0)[:, None]).squeeze(1)
    return found, whole | reached
