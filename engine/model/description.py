"""What a transformers configuration says about a model, in Shoal's words."""

from collections.abc import Iterator
from typing import Any

from engine.model.tokenizer_files import ModelInfo


def describe(config: Any, generation_config: Any | None = None) -> ModelInfo:
    """Read limits and special tokens from a model's configuration and, if it has one, its generation configuration."""
    text = config.get_text_config(decoder=True)
    sources = [source for source in (generation_config, text, config) if source is not None]
    return ModelInfo(
        architecture=(config.architectures or [type(config).__name__])[0],
        vocab_size=text.vocab_size,
        max_model_len=_length_limit(text),
        eos_token_ids=tuple(sorted({token for source in sources for token in _token_ids(source, "eos_token_id")})),
        bos_token_id=next((token for source in sources for token in _token_ids(source, "bos_token_id")), None),
    )


def _token_ids(source: Any, name: str) -> list[int]:
    value = getattr(source, name, None)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _length_limit(config: Any) -> int | None:
    """Return the positions a model has.

    Longrope switches its frequencies for the whole batch as soon as one sequence passes the original length, which
    would make a sequence depend on its neighbours; such a model is served up to that length.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    for rope in _rope_parameters(config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original and limit:
            limit = min(limit, int(original))
    return limit


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary parameters, which are one dictionary, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))
