"""One draw per row: random numbers that are functions of (seed, sample, position), and the tokens they choose.

Neither keeps a state, so what a row draws depends on its own logits, parameters and name only: a sequence that moves to
another engine draws what it would have drawn here, whatever shares the batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from engine.runner.filters import find_cuts, is_filtered
from engine.wire.sampling import SamplingParams

_BLOCK = 256
"""Tokens per block of the two-level draw."""

# --- random numbers ---------------------------------------------------------------------------------------------------

# Philox4x32-10 from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), computed on the host: 0.1 ms
# for a batch, and the same bits whatever the device. Device generators would tie the numbers to the batch.
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_ROUNDS = 10
_DOUBLE_STEP = 2.0**-52
_SEED_BITS = (1 << 64) - 1


def philox4x32(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return four random 32-bit words per row. counters [n, 4] and keys [n, 2] hold 32-bit words."""
    c0, c1, c2, c3 = counters.T
    k0, k1 = keys.T
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (right >> _SHIFT_32) ^ c1 ^ k0, (left >> _SHIFT_32) ^ c3 ^ k1
        c1, c3 = right & _LOW_32, left & _LOW_32
        k0, k1 = (k0 + _WEYL[0]) & _LOW_32, (k1 + _WEYL[1]) & _LOW_32
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(draws: Sequence[tuple[int, int, int]]) -> NDArray[np.float64]:
    """Return one number in [0, 1) with 52 random bits for each (seed, sample_index, output position).

    Of a seed the low 64 bits count.
    """
    keys = np.array([_words(seed & _SEED_BITS) for seed, _, _ in draws], dtype=np.uint64).reshape(-1, 2)
    counters = np.array([(position, sample, 0, 0) for _, sample, position in draws], dtype=np.uint64).reshape(-1, 4)
    words = philox4x32(counters, keys)
    return ((words[:, 0] << np.uint64(20)) | (words[:, 1] >> np.uint64(12))).astype(np.float64) * _DOUBLE_STEP


def _words(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, value >> 32


# --- tokens -----------------------------------------------------------------------------------------------------------


def draw(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], numbers: torch.Tensor
) -> torch.Tensor:
    """Return one token per row [R] of float32 ``logits`` [R, V], which are left with other content.

    best: [R], row maxima. numbers: [R], float64 in [0, 1). A row that is not a number gives any token.
    """
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device)
    scaled = logits.sub_(best[:, None]).div_(temperatures[:, None])  # the best token has 0 at any temperature
    filtered = [row for row, p in enumerate(params) if is_filtered(p)]
    if not filtered:
        return _draw(scaled.exp_(), numbers)
    weights = scaled.exp()
    if len(filtered) == len(params):
        _drop(weights, scaled, params)
    else:
        index = torch.tensor(filtered, device=logits.device)
        some = weights[index]
        _drop(some, scaled[index], [params[row] for row in filtered])
        weights[index] = some
    return _draw(weights, numbers)


def _drop(weights: torch.Tensor, scaled: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the weights [R, V] of what the filters drop to zero."""
    mass = _blocks(weights).sum(dim=-1).sum(dim=-1, dtype=torch.float64)
    cuts = find_cuts(scaled, mass, params)
    weights.masked_fill_(scaled < cuts[:, None], 0.0)


def _draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution of ``weights`` [R, V], in vocabulary order.

    Not in the order of weights: that would depend on how a sort breaks ties.
    """
    # In two levels, a block and a token in it: a running sum over the vocabulary costs several times as much.
    blocks = _blocks(weights)
    upto = blocks.sum(dim=-1).double().cumsum(dim=-1)
    targets = numbers * upto[:, -1]
    chosen = torch.searchsorted(upto, targets[:, None], right=True).clamp_(max=upto.shape[1] - 1)
    sums = upto.gather(1, chosen).squeeze(1)
    before = torch.where(chosen.squeeze(1) > 0, upto.gather(1, (chosen - 1).clamp(min=0)).squeeze(1), 0.0)
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    tokens = chosen.squeeze(1) * _BLOCK + _invert(inside, (targets - before) / (sums - before))
    return tokens.clamp_(max=weights.shape[1] - 1)  # only a row that is not a number leads into the padding


def _invert(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the first index whose running sum exceeds that share [R] of the whole; it has a weight above zero."""
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    whole = running[:, -1]
    # Rounding may make a share 1; then the largest number below the whole still finds the last weight above zero.
    targets = torch.minimum(shares.clamp(min=0.0) * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    found = torch.searchsorted(running, targets[:, None], right=True).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """Return [R, V] as [R, blocks, block], padded with zeros."""
    missing = -weights.shape[1] % _BLOCK
    return (pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, _BLOCK)
