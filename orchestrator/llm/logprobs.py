"""Log-probabilities of one choice on their way to its reader, and the texts of the single tokens they name."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tokenizers import decoders

from engine.wire.logprobs import Logprobs, PositionLogprobs
from engine.wire.messages import EngineCoreOutput
from orchestrator.llm.detokenizer import Detokenizer
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
        if token_id in self._added:  # kept as plain text, not in the alphabet of the others
            return token.encode()
        if self._bytes is not None and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()


class TokenLogprob(NamedTuple):
    """One token with its log-probability and the best ones at its place, best first.

    offset: characters of the choice's text before it. logprob: None for the first token of a prompt.
    """

    token_id: int
    token: TokenText
    offset: int
    logprob: float | None
    top: list[tuple[int, TokenText, float]]


class ChoiceLogprobs:
    """Collects the log-probabilities that were asked for. Read by the response, written by the output loop.

    prompt: the prompt's tokens, once they are known, when they were asked for.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt_token_ids: Sequence[int],
        *,
        outputs: int | None,
        prompt: int | None,
        echo: Detokenizer | None,
    ) -> None:
        """Open.

        outputs, prompt: best tokens wanted per position; None when the tokens themselves are not wanted.
        echo: the prompt begins the text, so its tokens come before the output's; decodes them, to find where
            each begins.
        """
        self.prompt: list[TokenLogprob] | None = None
        self._texts = texts
        self._prompt_token_ids = prompt_token_ids
        self._num_output_top = outputs
        self._num_prompt_top = prompt
        self._echo = echo
        self._length = 0
        self._fresh: list[TokenLogprob] = []

    @property
    def has_outputs(self) -> bool:
        """Tell whether ``take`` is of interest."""
        return self._num_output_top is not None

    def begin(self, logprobs: Logprobs | None, echoed: str) -> None:
        """Take what comes with the first output. echoed: the text of the prompt that begins the text of the choice."""
        if logprobs is not None:
            tokens = self._prompt_tokens(logprobs)
            if self._num_prompt_top is not None:
                self.prompt = _with_top(tokens, self._num_prompt_top)
            if self._echo is not None and self._num_output_top is not None:
                self._fresh += _with_top(tokens, self._num_output_top)
        self._length = len(echoed)

    def feed(self, output: EngineCoreOutput, detokenize: Callable[[list[int]], str]) -> str:
        """Take new tokens and return their text."""
        return "".join(self.pieces(output, detokenize))

    def pieces(self, output: EngineCoreOutput, detokenize: Callable[[list[int]], str]) -> Iterator[str]:
        """Take new tokens, one by one through the detokenizer, as the text of each is asked for."""
        if output.logprobs is None or not self.has_outputs:
            yield from (detokenize([token_id]) for token_id in output.new_token_ids)
            return
        for token_id, position in zip(output.new_token_ids, output.logprobs.positions(), strict=True):
            self._fresh.append(self._token_logprob(token_id, position, self._length))
            piece = detokenize([token_id])
            self._length += len(piece)
            yield piece

    def take(self) -> list[TokenLogprob]:
        """Return what came since the last take."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _prompt_tokens(self, logprobs: Logprobs) -> list[TokenLogprob]:
        first, *others = self._prompt_token_ids
        offset = len(self._echo.feed([first])) if self._echo is not None else 0
        tokens = [TokenLogprob(first, self._texts[first], 0, None, [])]
        for token_id, position in zip(others, logprobs.positions(), strict=True):
            tokens.append(self._token_logprob(token_id, position, offset))
            offset += len(self._echo.feed([token_id])) if self._echo is not None else 0
        return tokens

    def _token_logprob(self, token_id: int, position: PositionLogprobs, offset: int) -> TokenLogprob:
        best = zip(position.top_ids, position.top_values, strict=True)
        top = [(other, self._texts[other], value) for other, value in best]
        return TokenLogprob(token_id, self._texts[token_id], offset, position.chosen, top)


def _with_top(tokens: list[TokenLogprob], num_top: int) -> list[TokenLogprob]:
    return [token._replace(top=token.top[:num_top]) for token in tokens]
