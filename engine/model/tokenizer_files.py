"""Where the tokenizer files of a model are, so that an API process can read them without transformers or torch."""

import hashlib
import os
from pathlib import Path

from msgspec import Struct

from engine.model.names import ResolvedModel

INFO_FILE = "model_info.json"

_EXPORT_FORMAT = 1


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

    model, gguf_file: as in ``ModelConfig``. cache_dir: folder under which each model gets its own;
    None takes ``default_cache_dir()``.
    """

    model: str
    gguf_file: str | None = None
    cache_dir: str | None = None


class ExportReady(Struct, frozen=True, kw_only=True):
    """The one line ``python -m engine.model.export`` prints. written: False when fresh files were there already."""

    tokenizer_dir: str
    written: bool


def default_cache_dir() -> Path:
    """Return the folder for exported tokenizers below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shoal" / "tokenizers"


def tokenizer_folder(model: ResolvedModel, cache_dir: Path | None = None) -> Path | None:
    """Return a folder with ``tokenizer.json`` that can be read now, or None when the model must be exported first.

    A local folder with a ``tokenizer.json`` is used as it is; else a fresh export below ``cache_dir``.
    """
    if model.is_local and model.gguf_file is None and (Path(model.path) / "tokenizer.json").is_file():
        return Path(model.path)
    exported = export_folder(model, cache_dir)
    return exported if (exported / INFO_FILE).is_file() else None


def export_folder(model: ResolvedModel, cache_dir: Path | None = None) -> Path:
    """Return the folder that holds, or will hold, the export of a model.

    The name carries a hash of the path, size and modification time of what is exported: a changed model gets another
    folder, so a folder that exists is fresh. A hub name counts as unchanged for as long as the folder is there.
    """
    digest = hashlib.sha256(repr((_EXPORT_FORMAT, model.path, _stamps(model))).encode()).hexdigest()[:16]
    name = "".join(c if c.isalnum() or c in ".-_" else "-" for c in model.display_name)
    return (cache_dir or default_cache_dir()) / f"{name}-{digest}"


def _stamps(model: ResolvedModel) -> list[tuple[str, int, int]]:
    if not model.is_local:
        return [(model.gguf_file or "", 0, 0)]
    folder = Path(model.path)
    files = [folder / model.gguf_file] if model.gguf_file else sorted([*folder.glob("*.json"), *folder.glob("*.model")])
    return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
