"""What a request's stream looks like on the wire: one JSON body, or server-sent events.

Both are read by ``push.StreamWriter``: ``take()`` gives the bytes that are ready, ``finished`` says that they were the
last, ``start`` is the status line and headers that go before the first of them.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from orchestrator.api.errors import to_api_error
from orchestrator.api.logprobs import PromptLogprobs, chat_logprobs, completion_logprobs, prompt_logprobs
from orchestrator.api.sse import DONE, ChunkFormat, error_event
from orchestrator.llm.stream import Choice, RequestStream

StartMessage = dict[str, Any]
Headers = list[tuple[bytes, bytes]]

JSON_TYPE = (b"content-type", b"application/json")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ResponseBuilder(Protocol):
    """An answer in the making."""

    start: StartMessage
    finished: bool

    def take(self) -> bytes:
        """Return everything that can be sent now; empty when there is nothing to say yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What every part of one answer carries. created: Unix seconds. request_id: for the x-request-id header."""

    response_id: str
    request_id: str
    created: int
    model: str
    chat: bool
    include_usage: bool = False


def start_message(status: int, headers: Headers, request_id: str) -> StartMessage:
    """Return an ASGI response start that echoes the request id."""
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [*headers, (b"x-request-id", request_id.encode("latin-1"))],
    }


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
    """Server-sent events. An error before the first event is a plain error answer with its own status."""

    def __init__(self, stream: RequestStream, head: ResponseHead) -> None:
        self._stream = stream
        self._head = head
        self._format = ChunkFormat(
            head.response_id, head.created, head.model, chat=head.chat, include_usage=head.include_usage
        )
        self._opened: set[int] = set()
        self.start = start_message(200, _EVENTS, head.request_id)
        self.finished = False

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
        logprobs = _logprobs(choice, chat=self._head.chat)
        if reason is None:
            return opening + self._format.text(index, text, logprobs)
        return opening + self._format.end(index, text, reason, logprobs)

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs | None:
        """Return what a choice that opens tells of its prompt; a chat has one prompt and tells it once."""
        return None if self._head.chat and self._opened else _prompt_logprobs(choice)

    def _last(self) -> bytes:
        if self._stream.error is not None:
            return error_event(to_api_error(self._stream.error).content()) + DONE
        return (self._format.usage(usage_of(self._stream)) if self._head.include_usage else b"") + DONE

    def _error_body(self, error: Exception) -> bytes:
        self.start, body = error_answer(error, self._head.request_id)
        return body


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
            self.start, body = error_answer(self._stream.error, self._head.request_id)
            return body
        body = msgspec.json.encode(self._content())
        self.start = start_message(200, [JSON_TYPE, (b"content-length", b"%d" % len(body))], self._head.request_id)
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
        # A chat has one prompt, so vLLM tells it beside the choices.
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


def _logprobs(choice: Choice, *, chat: bool) -> dict[str, Any] | None:
    """Return the log-probabilities that came since the last time; None when none were asked for."""
    if choice.logprobs is None or not choice.logprobs.has_outputs:
        return None
    tokens = choice.logprobs.take()
    return chat_logprobs(tokens) if chat else completion_logprobs(tokens)


def _prompt_logprobs(choice: Choice) -> PromptLogprobs | None:
    """Return the log-probabilities of the prompt; None when they were not asked for."""
    scored = None if choice.logprobs is None else choice.logprobs.prompt
    return None if scored is None else prompt_logprobs(scored)


def _prompt_field(choice: Choice) -> dict[str, Any]:
    """Return the field with the prompt's log-probabilities, or no field."""
    told = _prompt_logprobs(choice)
    return {} if told is None else {"prompt_logprobs": told}


def error_answer(error: Exception, request_id: str) -> tuple[StartMessage, bytes]:
    """Return the start and the body of the answer that an exception gets."""
    answer = to_api_error(error)
    body = answer.body()
    return start_message(answer.status, _error_headers(answer.headers(), len(body)), request_id), body


def _error_headers(extra: dict[str, str], length: int) -> Headers:
    """Return the headers of an error answer of that many bytes."""
    named = [(name.encode(), value.encode()) for name, value in extra.items()]
    return [JSON_TYPE, (b"content-length", str(length).encode()), *named]
