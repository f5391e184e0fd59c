"""Both kinds of response, read as the stream writer reads them."""

import json
from typing import Any

from engine.wire.errors import EngineError
from orchestrator.api.serving.response_builders import JsonResponseBuilder, ResponseHead, StreamResponseBuilder
from orchestrator.llm.detokenizer import Detokenizer
from orchestrator.llm.stream import Choice, RequestStream
from orchestrator.llm.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
HEAD = ResponseHead(response_id="r", request_id="q", created=1, model="m", chat=True, include_usage=True)


def make_stream(num_choices: int = 1) -> RequestStream:
    choices = [
        Choice(
            index=index,
            request_id=1,
            sample_index=index,
            num_prompt_tokens=3,
            detokenizer=Detokenizer(TOKENIZER),
            stop=None,
            num_output_tokens=2,
        )
        for index in range(num_choices)
    ]
    return RequestStream(choices, created_at=0.0)


def events(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_stream_opens_each_choice_once_and_ends_with_usage_and_done() -> None:
    stream = make_stream(2)
    builder = StreamResponseBuilder(stream, HEAD)
    assert builder.take() == b""
    stream.add_text(stream.choices[1], "a")
    assert [event["choices"][0]["delta"] for event in events(builder.take())] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
    ]
    stream.end_choice(stream.choices[1], "b", "stop")
    stream.end_choice(stream.choices[0], "c", "length")
    *chunks, usage, done = events(builder.take())
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["stop", None, "length"]
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["prompt_tokens"] == 3
    assert done == "[DONE]"
    assert builder.finished
    assert builder.take() == b""


def test_an_error_before_the_first_event_has_its_own_status() -> None:
    stream = make_stream()
    builder = StreamResponseBuilder(stream, HEAD)
    stream.fail(EngineError("broken"))
    assert json.loads(builder.take())["error"]["message"] == "broken"
    assert builder.start["status"] == 500
    assert builder.finished


def test_an_error_behind_the_first_event_is_an_event_and_then_done() -> None:
    stream = make_stream()
    builder = StreamResponseBuilder(stream, HEAD)
    stream.add_text(stream.choices[0], "a")
    builder.take()
    stream.fail(EngineError("broken"))
    error, done = events(builder.take())
    assert error["error"]["message"] == "broken"
    assert done == "[DONE]"
    assert builder.start["status"] == 200


def test_a_whole_reply_waits_for_the_end() -> None:
    stream = make_stream()
    builder = JsonResponseBuilder(stream, HEAD)
    stream.add_text(stream.choices[0], "a")
    assert builder.take() == b""
    stream.end_choice(stream.choices[0], "b", "stop")
    body = builder.take()
    assert json.loads(body) == {
        "id": "r",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert (b"content-length", str(len(body)).encode()) in builder.start["headers"]
    assert builder.take() == b""


def test_a_whole_reply_that_failed_is_an_error_with_its_status() -> None:
    stream = make_stream()
    builder = JsonResponseBuilder(stream, HEAD)
    stream.fail(EngineError("broken"))
    assert json.loads(builder.take())["error"]["type"] == "server_error"
    assert builder.start["status"] == 500


def test_every_reply_echoes_the_request_id() -> None:
    assert (b"x-request-id", b"q") in StreamResponseBuilder(make_stream(), HEAD).start["headers"]
