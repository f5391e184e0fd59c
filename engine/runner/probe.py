"""Learns what a model's attention layers keep by running one token, and refuses what the paged cache cannot serve."""

import inspect
from typing import Any

import torch

from engine.model.loader import LoadedModel
from engine.runner.attention import STEP_KEYWORD, AttentionOptions, AttentionStep
from engine.runner.kv_cache import LayerShape
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
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0).transpose(0, 1)


def probe_layers(loaded: LoadedModel) -> list[LayerShape]:
    """Return what each layer keeps per token.

    Shapes seen beat shapes computed from the configuration: every family names its head counts and sizes differently.

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


def _check_layers(config: Any, name: str, recorder: _ShapeRecorder) -> None:
    num_layers: int = config.num_hidden_layers
    if sorted(recorder.shapes) != list(range(num_layers)):
        raise StartupError(
            f"{name} cannot be served: {len(recorder.shapes)} of {num_layers} layers keep keys and values"
        )
    types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    unknown = sorted(set(types) - _PAGED_LAYER_TYPES)
    unseen = [
        layer for layer, kind in enumerate(types) if kind == "sliding_attention" and recorder.windows[layer] is None
    ]
    if unknown or unseen:
        reason = f"layer types {', '.join(unknown)}" if unknown else f"layers {unseen} do not tell their window"
        raise StartupError(f"{name} cannot be served: {reason}")
