"""Token ids to text while they come, character by whole character, and the stop strings in it."""

from collections.abc import Sequence

from tokenizers import decoders

from orchestrator.llm.tokenizer import REPLACEMENT, TextTokenizer

_NUM_CONTEXT_TOKENS = 6  # enough for decoders that look at their neighbours; all of a prompt would cost its length


class Detokenizer:
    """Text of one token stream. What ``feed`` and ``flush`` return, joined, is the decoded stream.

    A character whose bytes spread over several tokens is held back until it is whole; one that never becomes whole is
    left out at the end. Special tokens are left out.
    """

    __slots__ = ("_backend", "_done", "_held", "_stream", "_whole_texts")

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        """Start behind a prompt: some decoders treat the first token of a text differently (a leading space)."""
        self._backend = tokenizer.backend
        self._whole_texts = tokenizer.whole_texts
        # tokens whose text is out, and tokens behind them whose text the stream still holds back
        self._done = self._context(prompt_token_ids) if tokenizer.whole_texts is None else []
        self._held: list[int] = []
        self._stream = decoders.DecodeStream(ids=self._done, skip_special_tokens=True)

    def feed(self, token_ids: list[int]) -> str:
        """Return the text these tokens complete, possibly none."""
        if len(token_ids) == 1 and self._whole_texts is not None and not self._held:
            text = self._whole_texts[token_ids[0]]  # past the stream, which need not know: nothing is held back
            if text is not None:
                return text
        step = token_ids[0] if len(token_ids) == 1 else token_ids  # an int is decoded in half the time of a list
        try:
            text = self._stream.step(self._backend, step)
        except Exception:  # noqa: BLE001 - the library raises bare Exception when decoded text changes in hindsight
            return self._restart(token_ids)
        if text is None:
            self._held += token_ids
            return ""
        self._done = self._held + token_ids if self._held else token_ids
        self._held = []
        return text

    def flush(self) -> str:
        """Return the whole characters still held back; call it once, at the end."""
        if not self._held:
            return ""
        before = self._decode(self._done)
        text = self._decode(self._done + self._held)
        self._held = []
        return text[len(before) :].rstrip(REPLACEMENT)

    def _restart(self, token_ids: list[int]) -> str:
        """Begin anew at these tokens: their text stands by itself."""
        held = self._held + token_ids
        self._done, self._held = [], []
        self._stream = decoders.DecodeStream(skip_special_tokens=True)
        text: str | None = self._stream.step(self._backend, held)
        if text is None:
            self._held = held
            return ""
        self._done = held
        return text

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return a prompt's tail if it ends with a whole character; else its text would be taken for output."""
        tail = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        return [] if self._decode(tail).endswith(REPLACEMENT) else tail

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text


class StopChecker:
    """Watches the text of one stream for the first stop string.

    The first is the one that is complete first; of several complete at the same character, the longest. So the result
    does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_longest", "_starts", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """Watch for any of these non-empty strings; the match itself is part of the output only on request."""
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, self._stops))
        self._starts = {stop[0] for stop in self._stops}
        self._held = ""  # text that may be the start of a stop string: shorter than the longest one

    def feed(self, text: str) -> tuple[str, bool]:
        """Return (text that may go out, whether a stop string was found). After a match, feed no more."""
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            self._held = ""
            start, end = match
            return buffer[: end if self._include else start], True
        keep = self._held_from(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def flush(self) -> str:
        """Return what was held back; call it once, when the stream ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int] | None:
        first: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                end = start + len(stop)
                if first is None or (end, start) < (first[1], first[0]):
                    first = start, end
        return first

    def _held_from(self, buffer: str) -> int:
        """Return where the longest end of the buffer that begins a stop string starts."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._starts and any(stop.startswith(buffer[start:]) for stop in self._stops):
                return start
        return len(buffer)
