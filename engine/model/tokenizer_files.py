"""The tokenizer files of a model: where they are, and the messages of the process that exports them.

API processes read these files, and so need neither transformers nor torch.
"""

from pathlib import Path

from msgspec import Struct

from engine.model.cache import cached_name, default_cache_dir
from engine.model.names import ResolvedModel

INFO_FILE = "model_info.json"
TOKENIZER_FILE = "tokenizer.json"


class ExportSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The order to ``python -m engine.model.export``, as JSON on its standard input.

    model, gguf_file: as in ``ModelConfig``. cache_dir: folder below which the files go; None takes
    ``default_cache_dir()``.
    """

    model: str
    gguf_file: str | None = None
    cache_dir: str | None = None


class ExportReady(Struct, frozen=True, kw_only=True):
    """The result of ``python -m engine.model.export``, as one line of JSON on its standard output."""

    tokenizer_dir: str


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
