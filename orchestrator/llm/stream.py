"""The stream of one accepted request: its choices, their text not yet taken, and its one end.

Written by the output loop, read by the request's response, both on the same event loop. Always true: a choice
that has a finish reason gets nothing more; a stream that is finished stays as it is.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.wire.errors import ShoalError
from engine.wire.tensors import Tensor
from orchestrator.llm.detokenizer import Detokenizer, StopChecker
from orchestrator.llm.logprobs import ChoiceLogprobs


@dataclass(slots=True, eq=False)
class Choice:
    """One token stream of a request.

    index: the place of the choice in the response. request_id, sample_index: its name in the engines.
    rank: the engine that serves it; -1 until it is sent. is_prompt_read: an engine has computed its prompt.
    first_token_at, last_token_at: monotonic seconds, 0 before the first token.
    queue_time_s: how long it waited, by its engine; None before the first token.
    token_ids: its tokens so far, where they are wanted besides the text; else None.
    echo: text of the prompt that goes out before its own; empty once it has. logprobs: if asked for.
    finish_reason: ``stop``, ``length`` or ``abort``; None while it runs, or when the whole stream failed.
    pooled: the vector of its prompt, with the end, where that was asked for instead of text.
    is_plain: its first token has come, and of the next ones nothing is wanted but their text: no stop strings, no
        log-probabilities, no token ids.
    write_text: set by a reader that takes text as it comes: sends a piece at once, or returns False when it cannot now,
        and the text waits in ``parts``.
    """

    index: int
    request_id: int
    sample_index: int
    num_prompt_tokens: int
    detokenizer: Detokenizer
    stop: StopChecker | None
    rank: int = -1
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    last_token_at: float = 0.0
    finish_reason: str | None = None
    parts: list[str] = field(default_factory=list)
    first_token_at: float = 0.0
    queue_time_s: float | None = None
    token_ids: list[int] | None = None
    echo: str = ""
    logprobs: ChoiceLogprobs | None = None
    pooled: Tensor | None = None
    is_prompt_read: bool = False
    is_plain: bool = False
    write_text: Callable[[str], bool] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Return its name in the engines."""
        return self.request_id, self.sample_index

    def take_text(self) -> str:
        """Return the text that came since the last take; what a slow reader left meanwhile is one piece."""
        parts = self.parts
        text = parts[0] if len(parts) == 1 else "".join(parts)
        parts.clear()
        return text


class RequestStream:
    """The choices of one request. It ends exactly once: all choices finished, or one error for the whole."""

    __slots__ = ("_fresh", "_num_open", "_on_update", "choices", "created_at", "error", "finished")

    def __init__(self, choices: list[Choice], created_at: float) -> None:
        """Open.

        choices: by index. created_at: monotonic seconds of the request's arrival.
        """
        self.choices = choices
        self.created_at = created_at
        self.finished = False  # the end has come; it may still wait to be taken
        self.error: ShoalError | None = None
        self._num_open = len(choices)
        self._fresh: list[Choice] = []
        self._on_update: Callable[[], None] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Return the prompt tokens of the request: samples of one prompt share it."""
        return sum(choice.num_prompt_tokens for choice in self.choices if choice.sample_index == 0)

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens produced so far by all choices."""
        return sum(choice.num_output_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Return the prompt tokens served from prefix caches, counted like ``num_prompt_tokens``."""
        return sum(choice.num_cached_tokens for choice in self.choices if choice.sample_index == 0)

    # --- written by the output loop -----------------------------------------------------------------------------

    def add_text(self, choice: Choice, text: str) -> None:
        """Add non-empty text to a choice that has not ended."""
        if not choice.parts:  # else it waits to be taken already
            self._fresh.append(choice)
        choice.parts.append(text)

    def end_choice(self, choice: Choice, text: str, finish_reason: str) -> bool:
        """Add the last text of a choice and its end; False (and nothing happens) when it or the stream had ended."""
        if choice.finish_reason is not None or self.finished:
            return False
        choice.finish_reason = finish_reason
        if not choice.parts:
            self._fresh.append(choice)
        if text:
            choice.parts.append(text)
        self._num_open -= 1
        self.finished = self._num_open == 0
        return True

    def fail(self, error: ShoalError) -> bool:
        """End the whole stream with one error; False when it had ended."""
        if self.finished:
            return False
        self.finished = True
        self.error = error
        return True

    def notify(self) -> None:
        """Call the reader: there is something to take."""
        if self._on_update is not None:
            self._on_update()

    # --- read by the response ------------------------------------------------------------------------------------

    def attach(self, on_update: Callable[[], None]) -> None:
        """Name the reader's callback. It is called from the output loop, once per batch, and must not block."""
        self._on_update = on_update
        if self._fresh or self.finished:
            on_update()

    def detach(self) -> None:
        """Forget the reader."""
        self._on_update = None

    def take(self) -> list[Choice]:
        """Return the choices that have news, each once; the caller takes their text before it yields."""
        fresh = self._fresh
        self._fresh = []
        return fresh

    async def wait_finished(self) -> None:
        """Wait for the end and take nothing, for readers that want the whole text at once."""
        ended = asyncio.Event()
        self.attach(lambda: ended.set() if self.finished else None)
        await ended.wait()
