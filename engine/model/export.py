"""The tokenizer export: ``python -m engine.model.export`` writes a model's tokenizer and limits as plain files.

API processes read these files with the small tokenizers library, so that none of them loads torch.
"""

import logging
import sys
from pathlib import Path
from typing import Any

import msgspec

from engine.model.cache import making_folder
from engine.model.model_info import ModelInfo
from engine.model.names import ResolvedModel, load_failure, resolve_model, source_arguments
from engine.model.tokenizer_files import (
    INFO_FILE,
    TOKENIZER_FILE,
    ExportReady,
    ExportSpec,
    export_folder,
    tokenizer_folder,
)
from engine.wire.errors import StartupError
from engine.wire.process import configure_logging, die_with_parent, leave_process_group, read_spec

_LOGGER = logging.getLogger(__name__)


def export(spec: ExportSpec) -> ExportReady:
    """Write the files of a model, unless a folder that can be read is there already.

    The files: ``tokenizer.json``, ``tokenizer_config.json``, ``model_info.json`` and, where the model has one,
    ``chat_template.jinja``. Their folder appears whole or not at all, also when two exports of one model race.

    Raises:
        StartupError: no such model, one without a fast tokenizer, or no room; one line with the reason.
    """
    resolved = resolve_model(spec.model, spec.gguf_file)
    cache_dir = None if spec.cache_dir is None else Path(spec.cache_dir)
    ready = tokenizer_folder(resolved, cache_dir)
    if ready is not None:
        return ExportReady(tokenizer_dir=str(ready))
    folder = export_folder(resolved, cache_dir)
    try:
        with making_folder(folder) as made:
            _write_files(resolved, made)
    except OSError as error:
        raise StartupError(
            f"the tokenizer of {resolved.display_name} cannot be written to {folder}: {error}"
        ) from error
    return ExportReady(tokenizer_dir=str(folder))


def main() -> int:
    """Run one export as a process: one JSON line on standard output, or one error line and exit status 1."""
    die_with_parent()
    leave_process_group()
    configure_logging("export")
    try:
        ready = export(read_spec(ExportSpec))
    except StartupError as error:
        _LOGGER.error("%s", error)  # noqa: TRY400 - the line is for the user; a traceback would bury it
        return 1
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    return 0


def _write_files(resolved: ResolvedModel, folder: Path) -> None:
    tokenizer, info = _read_model(resolved)
    tokenizer.save_pretrained(folder)
    if not (folder / TOKENIZER_FILE).is_file():
        raise StartupError(f"model {resolved.display_name} has no fast tokenizer ({TOKENIZER_FILE}), which Shoal needs")
    (folder / INFO_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(info)))


def _read_model(resolved: ResolvedModel) -> tuple[Any, ModelInfo]:
    """Return the tokenizer and the description of a model. No weights are read."""
    # Imported here, not above: an export that finds fresh files takes 0.1 s instead of 5.
    from transformers import AutoConfig, AutoTokenizer

    from engine.model.model_info import describe

    source = source_arguments(resolved)
    try:
        config = AutoConfig.from_pretrained(resolved.path, **source)
        tokenizer = AutoTokenizer.from_pretrained(resolved.path, **source)
        return tokenizer, describe(config, _generation_config(resolved.path))
    except Exception as error:  # the library's own, the hub's and the parser's errors
        raise load_failure(resolved, error) from error


def _generation_config(path: str) -> Any | None:
    """Return the generation configuration of a checkpoint; None when it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
