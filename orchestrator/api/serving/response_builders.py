"""Response builders: the bytes of a response from its stream, as one JSON body or as server-sent events.

All are read by ``StreamWriter``: ``take()`` gives the bytes that are ready, ``finished`` says that they were the last,
``start`` is the status line and headers that go before the first of them.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.wire.errors import OverloadedError
from orchestrator.api.base.asgi import StartMessage, error_response, json_start, start_message
from orchestrator.api.base.errors import to_api_error
from orchestrator.api.serving.protocol import EmbeddingRequest
from orchestrator.api.serving.sse import DONE, ChunkFormat, error_event
from orchestrator.llm.embeds import shorten
from orchestrator.llm.logprobs import TokenLogprob, TokenText
from orchestrator.llm.stream import Choice, RequestStream

PromptLogprobs = list[dict[str, Any] | None]

_encode = msgspec.json.Encoder().encode

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no number for; OpenAI's clients know it."""

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would else collect events before it passes them on
]


class ResponseBuilder(Protocol):
    """A response in the making."""

    start: StartMessage
    finished: bool

    def take(self) -> bytes:
        """Return everything that can be sent now; empty when there is nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The fields of every part of one response. created: Unix seconds. request_id: for the x-request-id header."""

    response_id: str
    request_id: str
    created: int
    model: str
    chat: bool
    include_usage: bool = False


def usage_of(stream: RequestStream) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    prompt, completion = stream.num_prompt_tokens, stream.num_output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": stream.num_cached_tokens},
    }


class StreamResponseBuilder:
    """Server-sent events. An error before the first event is a plain error response with its own status.

    send: if set, sends a part that is neither the first nor the last at once, or returns False; the text of open
        choices then goes there straight from the output loop.
    """

    def __init__(self, stream: RequestStream, head: ResponseHead) -> None:
        self._stream = stream
        self._head = head
        self._format = ChunkFormat(
            head.response_id, head.created, head.model, chat=head.chat, include_usage=head.include_usage
        )
        self._opened: set[int] = set()  # choices whose first chunk is out
        # Not sent before the first text: until then an error can have a status of its own.
        self.start = start_message(200, _EVENTS, head.request_id)
        self.finished = False
        self.send: Callable[[bytes], bool] | None = None

    def take(self) -> bytes:
        """Return the events of everything that is new."""
        fresh = self._stream.take()
        if len(fresh) == 1 and not self._stream.finished:
            choice = fresh[0]
            if choice.finish_reason is None and choice.index in self._opened and choice.logprobs is None:
                return self._format.text(choice.index, choice.take_text())  # as nearly always
        events = [self._event(choice) for choice in fresh]
        if self._stream.finished and not self.finished:
            self.finished = True
            if self._stream.error is not None and not self._opened:
                return self._error_body(self._stream.error)
            events.append(self._last())
        return b"".join(events)

    def _event(self, choice: Choice) -> bytes:
        index, text, reason = choice.index, choice.take_text(), choice.finish_reason
        opening = b""
        if index not in self._opened:
            opening = self._format.open_choice(index, self._prompt_logprobs(choice))
            self._opened.add(index)
            if self.send is not None and choice.is_plain:
                choice.write_text = _text_sender(self.send, *self._format.around_text(index))
        logprobs = _logprobs(choice, chat=self._head.chat)
        if reason is None:
            return opening + self._format.text(index, text, logprobs)
        return opening + self._format.end(index, text, reason, logprobs)

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs | None:
        """Return the prompt's part of a choice that opens; a chat has one prompt, so only its first choice has it."""
        return None if self._head.chat and self._opened else _prompt_logprobs(choice)

    def _last(self) -> bytes:
        if self._stream.error is not None:
            return error_event(to_api_error(self._stream.error).content()) + DONE
        return (self._format.usage(usage_of(self._stream)) if self._head.include_usage else b"") + DONE

    def _error_body(self, error: Exception) -> bytes:
        self.start, body = error_response(error, self._head.request_id)
        return body


def _text_sender(send: Callable[[bytes], bool], before: bytes, behind: bytes) -> Callable[[str], bool]:
    """Return what sends a piece of text as an event of its own, past everything that would only pass it on."""
    return lambda text: send(before + _encode(text) + behind)


class JsonResponseBuilder:
    """One JSON body, once everything is there."""

    def __init__(self, stream: RequestStream, head: ResponseHead) -> None:
        self._stream = stream
        self._head = head
        self.start: StartMessage = {}
        self.finished = False

    def take(self) -> bytes:
        """Return the body when the stream has ended."""
        if not self._stream.finished or self.finished:
            return b""
        self.finished = True
        if self._stream.error is not None:
            self.start, body = error_response(self._stream.error, self._head.request_id)
            return body
        body = msgspec.json.encode(self._content())
        self.start = json_start(200, len(body), self._head.request_id)
        return body

    def _content(self) -> dict[str, Any]:
        head = self._head
        content = {
            "id": head.response_id,
            "object": "chat.completion" if head.chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": [self._choice(choice) for choice in self._stream.choices],
            "usage": usage_of(self._stream),
        }
        # A chat has one prompt, so vLLM puts its log-probabilities beside the choices.
        return content | _prompt_field(self._stream.choices[0]) if head.chat else content

    def _choice(self, choice: Choice) -> dict[str, Any]:
        chat, text = self._head.chat, choice.take_text()
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {
            "index": choice.index,
            **content,
            "logprobs": _logprobs(choice, chat=chat),
            "finish_reason": choice.finish_reason,
            **({} if chat else _prompt_field(choice)),
        }


class EmbeddingResponseBuilder:
    """One JSON body, once every vector is there."""

    def __init__(self, stream: RequestStream, request: EmbeddingRequest, request_id: str) -> None:
        self._stream = stream
        self._request = request
        self._request_id = request_id
        self._items: dict[int, bytes] = {}
        self.start: StartMessage = {}
        self.finished = False

    def take(self) -> bytes:
        """Return the body when the stream has ended."""
        for choice in self._stream.take():
            if choice.pooled is not None:
                # Encoded one by one as they come: a thousand at once would hold the loop for half a second.
                self._items[choice.index] = self._item(choice)
                choice.pooled = None  # the numbers are not needed any more
        if not self._stream.finished or self.finished:
            return b""
        self.finished = True
        error = self._stream.error
        if error is None and len(self._items) < len(self._stream.choices):
            # An abort is an end and no error of the stream, but a response with vectors missing would be one.
            error = OverloadedError("the request was aborted before all its embeddings were there")
        if error is not None:
            self.start, body = error_response(error, self._request_id)
            return body
        body = self._body()
        self.start = json_start(200, len(body), self._request_id)
        return body

    def _item(self, choice: Choice) -> bytes:
        assert choice.pooled is not None
        vector = shorten(choice.pooled, self._request.dimensions)
        as_base64 = self._request.encoding_format == "base64"
        embedding: Any = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
        return _encode({"object": "embedding", "index": choice.index, "embedding": embedding})

    def _body(self) -> bytes:
        items = b",".join(self._items[index] for index in range(len(self._items)))
        num_tokens = self._stream.num_prompt_tokens
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        rest = _encode({"model": self._request.model, "usage": usage})
        return b'{"object":"list","data":[' + items + b"]," + rest[1:]


# --- log-probabilities in the shapes of the two endpoints ------------------------------------------------------------


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return ``logprobs`` of a chat choice."""
    return {"content": [_chat_token(token) for token in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return ``logprobs`` of a completion choice; the token itself is among the best ones even when it is none."""
    return {
        "tokens": [token.token.text for token in tokens],
        "token_logprobs": [_number(token.logprob) for token in tokens],
        "top_logprobs": [_top_by_text(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def prompt_logprobs(tokens: Sequence[TokenLogprob]) -> PromptLogprobs:
    """Return vLLM's ``prompt_logprobs``: for each token, by id, its own log-probability and the best ones."""
    return [None if token.logprob is None else _top_by_id(token) for token in tokens]


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    top = [_named(text, value) for _, text, value in token.top]
    return _named(token.token, token.logprob) | {"top_logprobs": top}


def _named(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": _number(logprob), "bytes": list(token.data)}


def _top_by_text(token: TokenLogprob) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    # Two tokens may have the same text: reversed, the better one is written last and counts.
    best = {text.text: _number(value) for _, text, value in reversed(token.top)}
    return dict(reversed(best.items())) | {token.token.text: _number(token.logprob)}


def _top_by_id(token: TokenLogprob) -> dict[str, dict[str, Any]]:
    named = [*token.top, (token.token_id, token.token, token.logprob)]
    return {str(token_id): {"logprob": _number(value), "decoded_token": text.text} for token_id, text, value in named}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST)


def _logprobs(choice: Choice, *, chat: bool) -> dict[str, Any] | None:
    """Return the log-probabilities since the last take; None when none were asked for."""
    if choice.logprobs is None or not choice.logprobs.has_outputs:
        return None
    tokens = choice.logprobs.take()
    return chat_logprobs(tokens) if chat else completion_logprobs(tokens)


def _prompt_logprobs(choice: Choice) -> PromptLogprobs | None:
    """Return the log-probabilities of the prompt; None when they were not asked for."""
    tokens = None if choice.logprobs is None else choice.logprobs.prompt
    return None if tokens is None else prompt_logprobs(tokens)


def _prompt_field(choice: Choice) -> dict[str, Any]:
    """Return the field with the prompt's log-probabilities, or no field."""
    logprobs = _prompt_logprobs(choice)
    return {} if logprobs is None else {"prompt_logprobs": logprobs}
