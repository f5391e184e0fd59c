"""``POST /v1/embeddings``: what is asked, and the answer."""

import base64
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, model_validator

from engine.wire.errors import OverloadedError
from orchestrator.api.fields import Prompts, Strict
from orchestrator.api.response_builders import JSON_TYPE, StartMessage, error_answer, start_message
from orchestrator.llm.stream import Choice, RequestStream
from orchestrator.llm.vectors import shorten

MAX_INPUTS = 2048
"""OpenAI's own limit."""

_encode = msgspec.json.Encoder().encode


class EmbeddingRequest(Strict):
    """Body of ``POST /v1/embeddings``; the meaning of each field is OpenAI's."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    data_parallel_rank: Annotated[int, Field(ge=0)] | None = None

    user: str | None = None

    @model_validator(mode="after")
    def _not_too_many_inputs(self) -> Self:
        if len(self.input) > MAX_INPUTS:
            raise ValueError(f"input holds {len(self.input)} prompts: {MAX_INPUTS} is the limit")
        return self


class EmbeddingResponseBuilder:
    """One JSON body, once every vector is there. Each is encoded as it comes: a thousand at once take a while."""

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
                self._items[choice.index] = self._item(choice)
                choice.pooled = None
        if not self._stream.finished or self.finished:
            return b""
        self.finished = True
        error = self._stream.error
        if error is None and len(self._items) < len(self._stream.choices):
            error = OverloadedError("the request was aborted before all its embeddings were there")
        if error is not None:
            self.start, body = error_answer(error, self._request_id)
            return body
        body = self._body()
        self.start = start_message(200, [JSON_TYPE, (b"content-length", b"%d" % len(body))], self._request_id)
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
