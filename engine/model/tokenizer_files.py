"""Where the tokenizer files of a model are, so that an API process can read them without transformers or torch."""

from pathlib import Path

from msgspec import Struct

from engine.model.cache import cached_name, default_cache_dir
from engine.model.names import ResolvedModel

INFO_FILE = "model_info.json"
TOKENIZER_FILE = "tokenizer.json"


class ModelInfo(Struct, frozen=True, kw_only=True):
    """What a model says about itself, as in ``model_info.json``.

    max_model_len: prompt + output tokens it was made for; None when it names no limit.
    eos_token_ids: tokens that end a sequence by themselves. architecture: class name in transformers.
    """

    architecture: str
    vocab_size: int
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


class ExportSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``python -m engine.model.export`` gets on its standard input as JSON.

    model, gguf_file: as in ``ModelConfig``. cache_dir: folder below which the files go; None takes
    ``default_cache_dir()``.
    """

    model: str
    gguf_file: str | None = None
    cache_dir: str | None = None


class ExportReady(Struct, frozen=True, kw_only=True):
    """The one line ``python -m engine.model.export`` prints. written: False when fresh files were there already."""

    tokenizer_dir: str
    written: bool


def tokenizer_folder(model: ResolvedModel, cache_dir: Path | None = None) -> Path | None:
    """Return a folder with ``tokenizer.json`` that can be read now, or None when the model must be exported first.

    A local folder with a ``tokenizer.json`` is used as it is; else a fresh export below ``cache_dir``.
    """
    if model.is_local and model.gguf_file is None and (Path(model.path) / TOKENIZER_FILE).is_file():
        return Path(model.path)
    exported = export_folder(model, cache_dir)
    return exported if exported.is_dir() else None


def export_folder(model: ResolvedModel, cache_dir: Path | None = None) -> Path:
    """Return the folder that holds, or will hold, the exported tokenizer of a model; it exists whole or not at all."""
    return (cache_dir or default_cache_dir()) / "tokenizers" / cached_name(model)
