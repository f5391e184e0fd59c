"""The tokenizer as llguidance needs it: which bytes each token is."""

import logging
from pathlib import Path

from llguidance import LLTokenizer

from engine.config.engine_config import ModelConfig
from engine.model.export import export
from engine.model.names import ResolvedModel, resolve_model
from engine.model.tokenizer_files import TOKENIZER_FILE, ExportSpec, ModelInfo, tokenizer_folder
from engine.runner.grammar import Grammars
from engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)

_SOURCES = ("tokenizer*", "vocab*", "*.model")


def load_grammars(config: ModelConfig, info: ModelInfo) -> Grammars | None:
    """Return the grammars of a model, or None, with the reason in the log, when its tokens cannot be matched."""
    if not info.eos_token_ids:
        _LOGGER.warning("no structured output: the model names no end-of-sequence token to end it with")
        return None
    try:
        text = (_folder(config) / TOKENIZER_FILE).read_text(encoding="utf-8")
        tokenizer = LLTokenizer(text, eos_token=list(info.eos_token_ids))
    except (StartupError, OSError, ValueError) as error:
        _LOGGER.warning("no structured output: %s", error)
        return None
    return Grammars(tokenizer, info.vocab_size, config.num_threads)


def _folder(config: ModelConfig) -> Path:
    """Return the folder of the tokenizer, exported now if no other process of this machine has done it yet.

    Raises:
        StartupError: the model has no tokenizer that can be exported.
    """
    resolved = resolve_model(config.model, config.gguf_file)
    folder = tokenizer_folder(resolved)
    if folder is not None:
        return folder
    if not _has_tokenizer(resolved):
        raise StartupError(f"there is no tokenizer in {resolved.path}")
    return Path(export(ExportSpec(model=config.model, gguf_file=config.gguf_file)).tokenizer_dir)


def _has_tokenizer(model: ResolvedModel) -> bool:
    """Tell whether it is worth trying: looking into a folder is quick, asking the library is not."""
    if not model.is_local or model.gguf_file is not None:
        return True
    return any(next(Path(model.path).glob(pattern), None) is not None for pattern in _SOURCES)
