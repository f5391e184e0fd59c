"""Writes a model's tokenizer and limits as plain files: ``python -m engine.model.export`` with an ExportSpec on stdin.

API processes read these files with the small tokenizers library, so that no API process loads torch.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from engine.model.names import ResolvedModel, resolve_model
from engine.model.source import load_failure, source_arguments
from engine.model.tokenizer_files import INFO_FILE, ExportReady, ExportSpec, ModelInfo, export_folder, tokenizer_folder
from engine.wire.errors import StartupError
from engine.wire.process import configure_logging, die_with_parent, ignore_interrupt, read_spec

_NEEDED_FILE = "tokenizer.json"


def export(spec: ExportSpec) -> ExportReady:
    """Write ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` (where the model has one) and
    ``model_info.json``, unless a readable folder is there already.

    The folder appears whole or not at all, also when two exports of one model race.

    Raises:
        StartupError: no such model, or one without a fast tokenizer; one line with the reason.
    """  # noqa: D205 - four file names do not fit one line
    resolved = resolve_model(spec.model, spec.gguf_file)
    cache_dir = None if spec.cache_dir is None else Path(spec.cache_dir)
    ready = tokenizer_folder(resolved, cache_dir)
    if ready is not None:
        return ExportReady(tokenizer_dir=str(ready), written=False)
    folder = export_folder(resolved, cache_dir)
    try:
        _write_whole(resolved, folder)
    except OSError as error:
        raise StartupError(
            f"the tokenizer of {resolved.display_name} cannot be written to {folder}: {error}"
        ) from error
    return ExportReady(tokenizer_dir=str(folder), written=True)


def main() -> int:
    """Run one export as a process; the ready line goes to standard output, a failure is one line on standard error."""
    die_with_parent()
    ignore_interrupt()
    configure_logging("export")
    try:
        ready = export(read_spec(ExportSpec))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the supervisor shows the last line
        return 1
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    return 0


def _write_whole(resolved: ResolvedModel, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True) as made:
        _write_files(resolved, Path(made))
        _publish(Path(made), folder)


def _publish(made: Path, folder: Path) -> None:
    """Rename the finished folder into place; a folder another export put there meanwhile is as good."""
    if folder.exists() and not (folder / INFO_FILE).is_file():
        shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if not (folder / INFO_FILE).is_file():
            raise


def _write_files(resolved: ResolvedModel, folder: Path) -> None:
    tokenizer, info = _read_model(resolved)
    tokenizer.save_pretrained(folder)
    if not (folder / _NEEDED_FILE).is_file():
        raise StartupError(f"model {resolved.display_name} has no fast tokenizer ({_NEEDED_FILE}); Shoal needs one")
    (folder / INFO_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(info)))


def _read_model(resolved: ResolvedModel) -> tuple[Any, ModelInfo]:
    """Return the tokenizer and the description of a model. No weights are read."""
    # Imported here, not above: an export that finds fresh files takes 0.1 s instead of 5.
    from transformers import AutoConfig, AutoTokenizer

    from engine.model.description import describe

    source = source_arguments(resolved)
    try:
        config = AutoConfig.from_pretrained(resolved.path, **source)
        tokenizer = AutoTokenizer.from_pretrained(resolved.path, **source)
        return tokenizer, describe(config, _generation_config(resolved.path))
    except Exception as error:  # the library's own, the hub's and the parser's errors
        raise load_failure(resolved, error) from error


def _generation_config(path: str) -> Any | None:
    """Return what the checkpoint says about generation; many name the end of a chat turn only there."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # the checkpoint has none
        return None


if __name__ == "__main__":
    sys.exit(main())
