"""The probe of a loaded model, one token long: the shape of its layers, and its optional features.

Configurations are no substitute: every family names its head counts and sizes differently, and some take or give less
than their signatures promise.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.loader import LoadedModel
from engine.runner.attention import STEP_KEYWORD, AttentionOptions, AttentionStep
from engine.runner.kv_cache import LayerShape
from engine.runner.pooling import capture_hidden_states
from engine.wire.errors import StartupError

_PAGED_LAYER_TYPES = {"full_attention", "sliding_attention"}


class _ShapeRecorder:
    """An attention step that notes shapes and windows; its one token sees only itself."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.shapes[layer] = LayerShape(
            num_kv_heads=key.shape[0], key_dim=key.shape[2], value_dim=value.shape[2], dtype=key.dtype
        )
        self.windows[layer] = options.window
        # Attention of one token to itself is its value.
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0).transpose(0, 1)


def run_one_token(
    model: Any, device: torch.device, step: AttentionStep | None = None, **inputs: torch.Tensor
) -> torch.Tensor:
    """Run one token that sees only itself, without a cache, and return its logits [1, 1, vocabulary].

    inputs: ``input_ids`` [1, 1] or ``inputs_embeds`` [1, 1, hidden_size].
    """
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    keywords = {STEP_KEYWORD: step or _ShapeRecorder()}
    with torch.inference_mode():
        output = model(position_ids=zero, use_cache=False, logits_to_keep=zero[0], **inputs, **keywords)
    logits: torch.Tensor = output.logits
    return logits


# --- layers -----------------------------------------------------------------------------------------------------------


def probe_layers(loaded: LoadedModel) -> list[LayerShape]:
    """Return what each layer keeps per token.

    Raises:
        StartupError: a layer keeps its past in another way (recurrent state, chunked attention, a mask of its own).
    """
    model, name = loaded.model, loaded.info.architecture
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise StartupError(f"{name} cannot be served: it takes no logits_to_keep")
    recorder = _ShapeRecorder()
    try:
        zero = torch.zeros(1, 1, dtype=torch.int64, device=loaded.device)
        run_one_token(model, loaded.device, recorder, input_ids=zero)
    except ValueError as error:
        raise StartupError(f"{name} cannot be served: {error}") from error
    _check_layers(model.config.get_text_config(decoder=True), name, recorder)
    return [recorder.shapes[layer] for layer in sorted(recorder.shapes)]


def _check_layers(config: Any, name: str, recorder: _ShapeRecorder) -> None:
    num_layers: int = config.num_hidden_layers
    if sorted(recorder.shapes) != list(range(num_layers)):
        raise StartupError(
            f"{name} cannot be served: {len(recorder.shapes)} of {num_layers} layers keep keys and values"
        )
    types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    unknown = sorted(set(types) - _PAGED_LAYER_TYPES)
    # Such a layer leaves its window to a mask of the library's, and there is none: it would see too much.
    unseen = [
        layer for layer, kind in enumerate(types) if kind == "sliding_attention" and recorder.windows[layer] is None
    ]
    if unknown or unseen:
        reason = f"layer types {', '.join(unknown)}" if unknown else f"layers {unseen} do not tell their window"
        raise StartupError(f"{name} cannot be served: {reason}")


# --- features ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFeatures:
    """What a model takes and gives besides tokens.

    hidden_size: numbers of an embedding and of a final hidden state. takes_embeds: embeddings may stand in for tokens.
    shows_states: the final hidden states can be captured.
    """

    hidden_size: int
    takes_embeds: bool
    shows_states: bool

    @property
    def names(self) -> set[str]:
        """Return the features as ``EngineReady.features`` names them."""
        known = {"prompt_embeds": self.takes_embeds, "pooling": self.shows_states}
        return {name for name, is_there in known.items() if is_there}


def probe_features(loaded: LoadedModel) -> ModelFeatures:
    """Run a token by its id and by its embedding, and compare the logits."""
    model = loaded.model
    zero = torch.zeros(1, 1, dtype=torch.int64, device=loaded.device)
    with torch.inference_mode():
        embeds: torch.Tensor = model.get_input_embeddings()(zero)
    with capture_hidden_states(model) as captured:
        expected = run_one_token(model, loaded.device, input_ids=zero)
    hidden_size = embeds.shape[-1]
    return ModelFeatures(
        hidden_size=hidden_size,
        takes_embeds=_gives_the_same(model, loaded.device, embeds, expected),
        shows_states=model.base_model is not model and bool(captured) and captured[-1].shape[-1] == hidden_size,
    )


def _gives_the_same(model: Any, device: torch.device, embeds: torch.Tensor, expected: torch.Tensor) -> bool:
    try:
        logits = run_one_token(model, device, inputs_embeds=embeds)
    except (TypeError, ValueError, RuntimeError):  # it insists on ids; which error that is depends on the family
        return False
    return torch.allclose(logits, expected)
