"""Shoal's attention function: what a transformers model calls in every layer instead of its own.

The model is run without a cache of its own and without masks, on one flat row of tokens of many sequences. Which
sequence a token belongs to, and where its past is, comes from the step object that travels through the model as the
keyword ``shoal_step``.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.runner.batch import DecodeRows, PrefillChunk, StepBatch
from engine.runner.kv_cache import PagedKVCache

ATTENTION_NAME = "shoal"
STEP_KEYWORD = "shoal_step"

_UNSET: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How one layer attends.

    window: positions a token sees, itself included; None for all. softcap: scores are squashed to +-softcap.
    sinks: [num_heads], a learned score per head that takes part in the softmax and carries no value.
    """

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionStep(Protocol):
    """What the attention function hands its work to."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return [T, num_heads, value_dim] for query [T, num_heads, key_dim] and the tokens' own keys and values."""


def register_attention() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; idempotent.

    No mask function is registered under the name: the library then makes no mask at all.
    """
    AttentionInterface.register(ATTENTION_NAME, _attention_forward)


class PagedStep:
    """One step over the paged cache."""

    def __init__(self, cache: PagedKVCache, batch: StepBatch) -> None:
        self._cache = cache
        self._batch = batch

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Store the tokens' keys and values, then let every token look at its own sequence."""
        keys, values = self._cache.write(layer, self._batch.slots, key, value)
        parts = []
        if self._batch.decode is not None:
            rows = self._batch.decode
            parts.append(_attend_decode(query[: len(rows.positions)], keys, values, rows, options))
        parts += [_attend_prefill(query[chunk.rows], keys, values, chunk, options) for chunk in self._batch.prefills]
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
        ValueError: the model wants something that is not done here; better refused than answered wrongly.
    """
    if attention_mask is not None or position_bias is not None or not getattr(module, "is_causal", True):
        raise ValueError("its attention brings its own mask, position bias or direction")
    if sliding_window is _UNSET:  # a few models leave it to the mask and only note it on the layer
        sliding_window = getattr(module, "sliding_window", None)
    options = AttentionOptions(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    layer: Any = module.layer_idx
    rows, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return shoal_step.attend(layer, rows, keys, values, options)[None], None


def _attend_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: DecodeRows, options: AttentionOptions
) -> torch.Tensor:
    """Attend for query [D, num_heads, key_dim], one token of each sequence, over whole gathered blocks.

    Heads that share keys are treated as several queries of one head, so that no key is copied.
    """
    num_rows, num_heads, key_dim = query.shape
    num_kv_heads = keys.shape[2]
    grouped = query.reshape(num_rows, num_kv_heads, -1, key_dim)
    gathered = (
        pool.index_select(0, rows.blocks.flatten()).view(num_rows, rows.num_keys, num_kv_heads, -1).transpose(1, 2)
        for pool in (keys, values)
    )
    sinks = None if options.sinks is None else options.sinks.view(1, num_kv_heads, -1, 1)
    mask = rows.mask(options.window, query.dtype)
    return _attend(grouped, *gathered, mask=mask, sinks=sinks, options=options).reshape(num_rows, num_heads, -1)


def _attend_prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: PrefillChunk, options: AttentionOptions
) -> torch.Tensor:
    """Attend for query [n, num_heads, key_dim], consecutive tokens of one sequence.

    Heads that share keys form the second dimension, over which the keys are expanded without a copy.
    """
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads = keys.shape[2]
    grouped = query.reshape(num_tokens, num_kv_heads, -1, key_dim).permute(1, 2, 0, 3)
    gathered = (
        pool.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.num_keys].transpose(0, 1)[:, None]
        for pool in (keys, values)
    )
    expanded = (tensor.expand(-1, num_heads // num_kv_heads, -1, -1) for tensor in gathered)
    sinks = None if options.sinks is None else options.sinks.view(num_kv_heads, -1, 1, 1)
    causal = chunk.is_plainly_causal(options.window) and options.softcap is None and sinks is None
    mask = None if causal else chunk.mask(options.window, query.dtype)
    attended = _attend(grouped, *expanded, mask=mask, sinks=sinks, options=options)
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend over [A, B, queries, dim] and [A, B, keys, dim]; no mask means plainly causal."""
    if options.softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=options.scaling
        )
    scaling = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
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
