"""What single tokens look like, for log-probabilities: their text as people see it, and their bytes."""

import re
from typing import Any, NamedTuple

from tokenizers import decoders

from orchestrator.llm.tokenizer import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenText(NamedTuple):
    """text: with replacement characters for what is only a part of a character. data: the bytes, UTF-8."""

    text: str
    data: bytes


class TokenTexts(dict[int, TokenText]):
    """Texts of tokens, learned as they occur."""

    def __init__(self, backend: Any) -> None:
        """Read from a ``tokenizers.Tokenizer``."""
        super().__init__()
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._bytes = {character: byte for byte, character in enumerate(byte_alphabet())} if byte_level else None

    def __missing__(self, token_id: int) -> TokenText:
        data = self._data(token_id)
        self[token_id] = found = TokenText(data.decode(errors="replace"), data)
        return found

    def _data(self, token_id: int) -> bytes:
        token: str = self._added.get(token_id) or self._backend.id_to_token(token_id) or ""
        if token_id in self._added:
            return token.encode()
        if self._bytes is not None and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
