"""The tokenizer: text to token ids and back, by the model's own files or as the sim engine's bytes.

Only the ``tokenizers`` library is used: ``transformers.AutoTokenizer`` would load torch into the API process.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.wire.errors import StartupError
from orchestrator.llm.chat_template import ChatTemplate

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders put in place of bytes that are no whole character."""

_BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "
)

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TextTokenizer:
    """A tokenizer with its chat template. Encoding is thread-safe and leaves the GIL to others.

    whole_texts: token -> its text, for tokens made of whole characters, of a tokenizer whose tokens mean the same
        wherever they stand (byte-level ones); None for other tokenizers.
    longest_token: characters of the longest token: a text has no fewer tokens than its length divided by this.
    """

    def __init__(self, backend: Any, chat_template: ChatTemplate | None) -> None:
        """Wrap.

        backend: a ``tokenizers.Tokenizer``; padding and truncation are switched off.
        chat_template: None for a base model, which then serves completions only.
        """
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.chat_template = chat_template
        self.longest_token = max(map(len, backend.get_vocab()), default=1)
        self.whole_texts = _WholeTexts(backend) if isinstance(backend.decoder, decoders.ByteLevel) else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids. A text rendered by a chat template holds its special tokens already."""
        # The batch call lets go of the GIL, and the fast one keeps no offsets: a fifth of the time for a long text.
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text; special tokens are left out."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=True)
        return text


class _WholeTexts(dict[int, str | None]):
    """Texts of single tokens, learned as they occur; None for a token that is only a part of a character."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> str | None:
        text: str = self._backend.decode([token_id], skip_special_tokens=True)
        self[token_id] = whole = None if REPLACEMENT in text else text
        return whole


def load_tokenizer(folder: Path | None) -> TextTokenizer:
    """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` from a folder.

    folder: None gives the sim engine's byte tokenizer.

    Raises:
        StartupError: a file is missing or unreadable; names it.
    """
    if folder is None:
        return byte_tokenizer()
    path = folder / "tokenizer.json"
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a missing or broken file
        raise StartupError(f"cannot read the tokenizer {path}: {error}") from error
    config = _read_config(folder / "tokenizer_config.json")
    source = _template_source(folder / "chat_template.jinja", config)
    template = None if source is None else ChatTemplate(source, _special_tokens(config))
    return TextTokenizer(backend, template)


def byte_tokenizer() -> TextTokenizer:
    """Return the tokenizer of the sim engine: 256 ids, each id is the byte of that value, in UTF-8."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(backend, ChatTemplate(_BYTE_CHAT_TEMPLATE, {}))


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of each byte 0..255, as GPT-2's byte-level BPE defined it."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    return config if isinstance(config, dict) else {}


def _template_source(path: Path, config: dict[str, Any]) -> str | None:
    if path.exists():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates: the one for plain chat is called "default"
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens; each is a string or ``{"content": ...}`` in the file."""
    found = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
