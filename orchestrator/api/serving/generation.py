"""The generation endpoints: a raw ASGI callable in front of everything else.

FastAPI's routing and middleware cost 0.3 ms per request and wrap every ``send``, so the requests that matter do not
pass through them. Streams and JSON responses take the same way: the text is written from the output loop, and the
request's own task only waits for the end, or for the caller to go away.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.wire.errors import InvalidRequestError, OverloadedError
from metrics.stats import ServingStats
from orchestrator.api.base.asgi import Receive, Send, random_name, request_id_of, send_error
from orchestrator.api.base.errors import ApiError, to_api_error
from orchestrator.api.serving.admission import Admission, BodyReader, CallerGoneError, OpenRequests
from orchestrator.api.serving.npy import read_prompts
from orchestrator.api.serving.protocol import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from orchestrator.api.serving.response_builders import (
    EmbeddingResponseBuilder,
    JsonResponseBuilder,
    ResponseBuilder,
    ResponseHead,
    StreamResponseBuilder,
)
from orchestrator.api.serving.stream_writer import StreamWriter
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.stream import RequestStream

Request = ChatCompletionRequest | CompletionRequest | EmbeddingRequest

_REQUESTS: Mapping[str, type[Request]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
_RANK_HEADER = b"x-data-parallel-rank"
_MAX_RANK_DIGITS = 9

Scope = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Opened:
    """One request under way. request_id, response_id: the names its caller knows it by."""

    request_id: str
    response_id: str
    stream: RequestStream
    builder: ResponseBuilder


class GenerationApp:
    """Serves ``POST`` on its paths and leaves every other request to the next application."""

    def __init__(
        self,
        llm: AsyncLLM,
        admission: Admission,
        stats: ServingStats,
        served_model_name: str,
        open_requests: OpenRequests,
        fallback: Any,
    ) -> None:
        """Wrap. fallback: the ASGI application for everything else."""
        self._llm = llm
        self._admission = admission
        self._stats = stats
        self._model = served_model_name
        self._open_requests = open_requests
        self._fallback = fallback
        self._bodies = BodyReader()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        path = str(scope.get("path"))
        if scope["type"] != "http" or path not in _REQUESTS:
            await self._fallback(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = request_id_of(headers)
        if scope["method"] != "POST":
            error = ApiError(405, f"{scope['method']} is not allowed on {path}: use POST", allow="POST")
            await self._refuse(error, request_id, send)
            return
        try:
            self._admission.ensure_room()  # before the body: megabytes are not read to be refused
            body = await self._bodies.read(receive)
            self._admission.enter()  # only now: half a request must not keep others out
        except CallerGoneError:
            return
        except (ApiError, OverloadedError) as error:
            await self._refuse(error, request_id, send)
            return
        try:
            await self._serve(_REQUESTS[path], body, headers, request_id, receive, send)
        finally:
            self._admission.leave()

    async def _serve(
        self,
        kind: type[Request],
        body: bytes,
        headers: dict[bytes, bytes],
        request_id: str,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            opened = await self._open(kind.model_validate_json(body), headers, request_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets a response; the unforeseen is logged
            await self._refuse(error, request_id, send)
            return
        await self._answer(opened, receive, send)

    async def _open(self, request: Request, headers: dict[bytes, bytes], request_id: str) -> _Opened:
        if request.model != self._model:
            raise ApiError(
                404,
                f"the model {request.model!r} does not exist here: this server serves {self._model!r}",
                param="model",
                code="model_not_found",
            )
        rank = _explicit_rank(headers, request.data_parallel_rank)
        if isinstance(request, EmbeddingRequest):
            stream = await self._llm.embed(
                request.input,
                dimensions=request.dimensions,
                data_parallel_rank=rank,
                priority=request.priority or 0,
            )
            return _Opened(
                request_id, f"embd-{random_name()}", stream, EmbeddingResponseBuilder(stream, request, request_id)
            )
        stream = await self._generate(request, rank)
        chat = isinstance(request, ChatCompletionRequest)
        head = ResponseHead(
            response_id=f"{'chatcmpl' if chat else 'cmpl'}-{random_name()}",
            request_id=request_id,
            created=int(time.time()),
            model=self._model,
            chat=chat,
            include_usage=request.include_usage,
        )
        builder = (StreamResponseBuilder if request.stream else JsonResponseBuilder)(stream, head)
        return _Opened(request_id, head.response_id, stream, builder)

    async def _generate(self, request: ChatCompletionRequest | CompletionRequest, rank: int | None) -> RequestStream:
        params = request.to_params(rank)
        if isinstance(request, ChatCompletionRequest):
            return await self._llm.chat([message.for_template() for message in request.messages], params)
        if request.prompt_embeds is None:
            return await self._llm.generate(request.prompt, params)
        # in a thread: 128 MiB of base64 would hold the loop, and the first one imports NumPy
        return await self._llm.generate(await asyncio.to_thread(read_prompts, request.prompt_embeds), params)

    async def _answer(self, opened: _Opened, receive: Receive, send: Send) -> None:
        """Send the response while it is generated; when the caller goes away first, free its slots in the engines."""
        stream = opened.stream
        writer = StreamWriter(opened.builder, receive, send)
        if isinstance(opened.builder, StreamResponseBuilder):
            opened.builder.send = writer.send_part
        self._open_requests.add(opened.request_id, opened.response_id, stream)
        try:
            stream.attach(writer.on_update)  # may write at once: the first tokens may be there already
            await writer.run()
        finally:
            self._open_requests.remove(opened.request_id, opened.response_id, stream)
            stream.detach()
            if not stream.finished:
                await self._llm.abort(stream)
            await writer.aclose()

    async def _refuse(self, error: Exception, request_id: str, send: Send) -> None:
        answer = to_api_error(error)
        self._stats.on_rejected(str(answer.status))
        await send_error(answer, request_id, send)


def _explicit_rank(headers: dict[bytes, bytes], from_body: int | None) -> int | None:
    """Return the rank that the caller insists on, from the header or the body.

    Raises:
        InvalidRequestError: the header is no number, or contradicts the body.
    """
    given = headers.get(_RANK_HEADER)
    if given is None:
        return from_body
    if not given.isdigit() or len(given) > _MAX_RANK_DIGITS:
        raise InvalidRequestError(f"{_RANK_HEADER.decode()} must be a rank number", "data_parallel_rank")
    if from_body not in (None, int(given)):
        raise InvalidRequestError(
            f"{_RANK_HEADER.decode()} says rank {int(given)}, the body says {from_body}", "data_parallel_rank"
        )
    return int(given)
