"""The description of a model: the limits and end tokens that its transformers configuration names."""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct


class ModelInfo(Struct, frozen=True, kw_only=True):
    """Limits and end tokens of a model, as in ``model_info.json``.

    max_model_len: prompt + output tokens it was made for; None when it names no limit.
    eos_token_ids: tokens that end a sequence by themselves. architecture: class name in transformers.
    """

    architecture: str
    vocab_size: int
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def describe(config: Any, generation_config: Any | None = None) -> ModelInfo:
    """Read a model's configuration and, if it has one, its generation configuration."""
    text = config.get_text_config(decoder=True)
    # All of them count: many checkpoints name the end of a chat turn in the generation configuration only.
    sources = [source for source in (generation_config, text, config) if source is not None]
    return ModelInfo(
        architecture=(config.architectures or [type(config).__name__])[0],
        vocab_size=text.vocab_size,
        max_model_len=_length_limit(text),
        eos_token_ids=tuple(sorted({token for source in sources for token in _eos_token_ids(source)})),
    )


def _eos_token_ids(source: Any) -> list[int]:
    value = getattr(source, "eos_token_id", None)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _length_limit(config: Any) -> int | None:
    """Return the positions a model has."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    for rope in _rope_parameters(config):
        original = rope.get("original_max_position_embeddings")
        # Longrope switches its frequencies for the whole batch as soon as one sequence passes the original length, so
        # that a sequence would depend on its neighbours. Such a model is served up to that length.
        if rope.get("rope_type") == "longrope" and original and limit:
            limit = min(limit, int(original))
    return limit


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary parameters, which are one dictionary, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))
