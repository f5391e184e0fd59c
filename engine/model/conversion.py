"""Unpacks a GGUF file once and keeps the result: the library takes half a minute for what then takes a second."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from engine.model.cache import cached_name, default_cache_dir, making_folder, one_at_a_time
from engine.model.names import ResolvedModel
from engine.model.progress import OnProgress
from engine.model.source import source_arguments


def unpacked_weights(model: ResolvedModel, dtype: torch.dtype, on_progress: OnProgress) -> Path:
    """Return a folder with the weights of a GGUF model as safetensors of ``dtype``, made now if need be.

    Of several ranks that start together one unpacks and the others wait for it.

    Raises:
        OSError: the cache folder cannot be written, or the file cannot be read.
        ValueError: the library does not know the file's architecture.
    """
    folder = default_cache_dir() / "weights" / cached_name(model, str(dtype).removeprefix("torch."))
    if folder.is_dir():
        return folder
    on_progress("unpacking the GGUF file (once)", 0.05)
    with one_at_a_time(folder):
        if not folder.is_dir():
            with making_folder(folder) as made:
                unpack(model, dtype).save_pretrained(made)
    return folder


def unpack(model: ResolvedModel, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Return the model straight from its GGUF file, every weight unpacked."""
    return AutoModelForCausalLM.from_pretrained(
        model.path,
        dtype=dtype,
        attn_implementation=attention,
        quantization_config=GgufConfig(dequantize=True),  # packed weights want kernels downloaded from the hub
        **source_arguments(model),
    )
