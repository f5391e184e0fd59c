"""top-k, top-p and min-p as one cut per row: the lowest scaled logit that may still be drawn.

All three keep a prefix of the tokens in descending order, so together they keep the shortest of the three prefixes.
top-p measures mass within what top-k left, as transformers does. Tokens that tie with the last one kept are kept.

Scaled logits are divided by the temperature and shifted so that the best token of each row has 0; their exponentials
are the weights of the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.wire.sampling import SamplingParams

_WIDTH = 1024
"""Best tokens examined first. Sorting a whole vocabulary costs several times as much, and only a row whose mass is
spread wider than this needs it."""


def is_filtered(params: SamplingParams) -> bool:
    """Tell whether any of the three filters may drop a token."""
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def find_cuts(scaled: torch.Tensor, mass: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the cut of each row [R] of float32 scaled logits [R, V].

    mass: [R], the sum of the weights of all tokens.
    """
    vocab_size = scaled.shape[1]
    filters = Filters.of(params, vocab_size, scaled.device)
    if vocab_size <= _WIDTH:
        return filters.cut(top_values(scaled, vocab_size), mass)[0]
    cuts, holds = filters.cut(top_values(scaled, _WIDTH), mass)
    pending = (~holds).nonzero().squeeze(1)
    if pending.numel():
        best = top_values(scaled[pending], vocab_size)
        cuts[pending] = filters.select(pending).cut(best, mass[pending])[0]
    return cuts


def top_values(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return the ``width`` highest values of each row, descending [R, width]."""
    if rows.device.type != "cpu":
        return rows.topk(width, dim=-1).values
    values, start = rows.numpy(), rows.shape[1] - width
    if start:
        values = np.partition(values, start, axis=-1)[:, start:]  # torch's topk takes five times as long on a CPU
    return torch.from_numpy(np.sort(values, axis=-1)).flip(-1)  # and its sort ten times


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of R rows.

    top_k: [R], at most the vocabulary. top_p: [R], infinite when off. min_logit: [R], scaled, minus infinity when off.
    """

    vocab_size: int
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_logit: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "Filters":
        """Gather the filters of some rows."""
        top_p = [p.top_p if p.top_p < 1.0 else torch.inf for p in params]
        return cls(
            vocab_size=vocab_size,
            top_k=torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params], device=device),
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
            # A share of the best token's probability is a distance below its scaled logit, which is 0.
            min_logit=torch.tensor([p.min_p for p in params], device=device).log(),
        )

    def select(self, rows: torch.Tensor) -> "Filters":
        """Return the filters of these rows."""
        return Filters(
            vocab_size=self.vocab_size,
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_logit=self.min_logit[rows],
        )

    def cut(self, best: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the cut among the W best tokens of each row; return the cuts [R] and whether each one holds [R].

        best: [R, W], descending scaled logits. mass: [R], the sum of the weights of all tokens.

        A cut holds when every token it keeps is surely among the W best. Whether it does depends on the row alone.
        """
        width = best.shape[1]
        in_top_k = torch.arange(width, device=best.device) < self.top_k[:, None]
        weights = best.double().exp() * in_top_k
        cumulative = weights.cumsum(dim=-1)
        within = torch.where(self.top_k <= width, cumulative[:, -1], mass)
        # A token is kept while the mass before it is less than top_p: the one that reaches it still belongs to it.
        num_kept = (in_top_k & (cumulative - weights < (self.top_p * within)[:, None])).sum(dim=-1)
        last_kept = best.gather(1, (num_kept - 1).clamp(min=0)[:, None]).squeeze(1)
        cut = torch.maximum(last_kept, self.min_logit)
        if width == self.vocab_size:
            return cut, torch.ones_like(cut, dtype=torch.bool)
        # The mass of what top-k leaves is unknown when that is more than the W tokens examined.
        is_mass_known = (self.top_k <= width) | (self.top_k == self.vocab_size) | self.top_p.isinf()
        # Strictly below: a token that ties with the cut may lie beyond the W best.
        return cut, is_mass_known & (best[:, -1] < cut)
