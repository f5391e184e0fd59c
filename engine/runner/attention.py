"""The paged attention function, which a transformers model calls in every layer instead of its own.

The model is run without a cache of its own and without masks, on one flat row of tokens of many sequences. Which
sequence a token belongs to, and where its past lies, comes from the step object that travels through the model as the
keyword ``shoal_step``.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.runner.attention_metadata import DecodeGroup, KeyView, PrefillChunk
from engine.runner.batch import StepBatch
from engine.runner.kv_cache import PagedKVCache

ATTENTION_NAME = "shoal"
STEP_KEYWORD = "shoal_step"

_UNSET: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How one layer attends.

    window: positions a token sees, itself included; None for all. softcap: attention scores are squashed to +-softcap.
    sinks: [num_heads], a learned attention score per head that takes part in the softmax and carries no value.
    """

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def is_standard(self) -> bool:
        """Tell whether PyTorch's own attention computes it."""
        return self.softcap is None and self.sinks is None


class AttentionStep(Protocol):
    """One forward pass, as the attention function of each layer sees it."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return [T, num_heads, value_dim] for query [num_heads, T, key_dim] and the tokens' own keys and values."""


def register_attention() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; idempotent."""
    # No mask function is registered under the name: the library then makes no mask at all.
    AttentionInterface.register(ATTENTION_NAME, _attention_forward)


class PagedStep:
    """The forward pass of a step over the paged cache."""

    def __init__(self, cache: PagedKVCache, batch: StepBatch) -> None:
        self._cache = cache
        self._batch = batch

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Store the tokens' keys and values, then let every token attend to its own sequence."""
        pools = self._cache.write(layer, self._batch.slots, key, value)
        parts = [_attend_decode(query[:, group.rows], pools, group, options) for group in self._batch.decodes]
        for chunk in self._batch.prefills:
            own = key[:, chunk.rows], value[:, chunk.rows]
            parts.append(_attend_prefill(query[:, chunk.rows], own, pools, chunk, options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = _UNSET,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    shoal_step: AttentionStep,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer; query, key and value are [1, heads, T, dim], the result [1, T, heads, dim].

    Raises:
        ValueError: the model needs something that is not done here; better refused than answered wrongly.
    """
    if attention_mask is not None or position_bias is not None or not getattr(module, "is_causal", True):
        raise ValueError("its attention brings its own mask, position bias or direction")
    if sliding_window is _UNSET:  # a few models leave it to the mask and only store it on the layer
        sliding_window = getattr(module, "sliding_window", None)
    options = AttentionOptions(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    layer: Any = module.layer_idx
    return shoal_step.attend(layer, query[0], key[0], value[0], options)[None], None


def _attend_decode(
    query: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], group: DecodeGroup, options: AttentionOptions
) -> torch.Tensor:
    """Attend for query [num_heads, R, key_dim], one token of each sequence, over whole gathered blocks."""
    num_heads, num_rows, key_dim = query.shape
    num_kv_heads = pools[0].shape[0]
    view = group.view(options.window, query.dtype)
    # Heads that share keys become several queries of one head, so that no key is copied.
    grouped = query.transpose(0, 1).reshape(num_rows, num_kv_heads, -1, key_dim)
    keys, values = (_gather(pool, view, num_rows) for pool in pools)
    sinks = None if options.sinks is None else options.sinks.view(1, num_kv_heads, -1, 1)
    if options.is_standard:
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=view.mask, scale=options.scaling)
    else:
        attended = _attend_eagerly(grouped, keys, values, view.mask, sinks, options)
    return attended.reshape(num_rows, num_heads, -1)


def _attend_prefill(
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    pools: tuple[torch.Tensor, torch.Tensor],
    chunk: PrefillChunk,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend for query [num_heads, n, key_dim], consecutive tokens of one sequence.

    own: keys and values [num_kv_heads, n, dim] of these tokens, which are all there are for a sequence's beginning.
    """
    num_heads, num_tokens, key_dim = query.shape
    num_kv_heads = own[0].shape[0]
    view = chunk.view(options.window, query.dtype, implies_causality=options.is_standard)
    past_and_own = own if chunk.start == 0 else (_gather(pool, view, 1)[0] for pool in pools)
    # Heads that share keys form the second dimension, over which the keys are expanded without a copy.
    grouped = query.reshape(num_kv_heads, -1, num_tokens, key_dim)
    keys, values = (tensor[:, None].expand(-1, num_heads // num_kv_heads, -1, -1) for tensor in past_and_own)
    if options.is_standard:
        attended = scaled_dot_product_attention(
            grouped, keys, values, attn_mask=view.mask, is_causal=view.mask is None, scale=options.scaling
        )
    else:
        sinks = None if options.sinks is None else options.sinks.view(num_kv_heads, -1, 1, 1)
        attended = _attend_eagerly(grouped, keys, values, view.mask, sinks, options)
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1)


def _gather(pool: torch.Tensor, view: KeyView, num_rows: int) -> torch.Tensor:
    """Return [num_rows, num_kv_heads, num_keys, dim] out of a pool [num_kv_heads, num_blocks, block_size, dim]."""
    num_kv_heads, num_blocks, _, dim = pool.shape
    # A head's part of a block is one row of a matrix: rows are gathered by several threads, other dimensions are not.
    gathered = pool.flatten(0, 1).flatten(1).index_select(0, view.matrix_rows(num_kv_heads, num_blocks))
    return gathered.view(num_kv_heads, num_rows, -1, dim).transpose(0, 1)[:, :, : view.num_keys]


def _attend_eagerly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend over [A, B, queries, dim] and [A, B, keys, dim]; without a mask every query sees every key."""
    scaling = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    # In float32 up to the softmax: half precision would lose the differences between large scores.
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1) if sinks is None else _softmax_with_sinks(scores, sinks.float())
    return torch.matmul(weights.to(value.dtype), value)


def _softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the scores and one sink each, without the sink's own share."""
    with_sinks = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return with_sinks.softmax(dim=-1)[..., :-1]
