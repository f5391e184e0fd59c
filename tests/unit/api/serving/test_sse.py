"""The chunks of a streamed answer, in OpenAI's shape."""

import json
from typing import Any

import pytest

from orchestrator.api.serving.sse import DONE, ChunkFormat, error_event

NASTY = 'a"\\\n\r\u2028🐟\x00'


def parse(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[len(b"data: ") :])


def make(*, chat: bool = True, include_usage: bool = False) -> ChunkFormat:
    return ChunkFormat("id-1", 7, 'm"odel', chat=chat, include_usage=include_usage)


def test_a_chat_chunk_has_openais_shape() -> None:
    chunks = make()
    opening = parse(chunks.open_choice(2))
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parse(chunks.text(2, NASTY)) == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": 'm"odel',
        "choices": [{"index": 2, "delta": {"content": NASTY}, "logprobs": None, "finish_reason": None}],
    }


def test_a_completion_chunk_has_openais_shape() -> None:
    chunks = make(chat=False)
    assert chunks.open_choice(0) == b""
    assert parse(chunks.text(0, NASTY)) == {
        "id": "id-1",
        "object": "text_completion",
        "created": 7,
        "model": 'm"odel',
        "choices": [{"index": 0, "text": NASTY, "logprobs": None, "finish_reason": None}],
    }


def test_the_first_chunk_has_the_prompts_log_probabilities_where_a_whole_answer_has_them() -> None:
    told = [None, {"5": {"logprob": -1.0, "decoded_token": "a"}}]
    opening = parse(make().open_choice(0, told))
    assert opening["prompt_logprobs"] == told
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (choice,) = parse(make(chat=False).open_choice(1, told))["choices"]
    assert choice == {"index": 1, "prompt_logprobs": told, "text": "", "logprobs": None, "finish_reason": None}


@pytest.mark.parametrize(("text", "delta"), [("", {}), ("x", {"content": "x"})])
def test_the_last_chat_chunk_has_the_reason_and_what_is_left(text: str, delta: dict[str, str]) -> None:
    chunks = make()
    chunks.open_choice(0)
    (choice,) = parse(chunks.end(0, text, "stop"))["choices"]
    assert choice == {"index": 0, "delta": delta, "logprobs": None, "finish_reason": "stop"}


def test_the_last_completion_chunk_has_a_text_even_when_empty() -> None:
    chunks = make(chat=False)
    chunks.open_choice(0)
    (choice,) = parse(chunks.end(0, "", "length"))["choices"]
    assert choice == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}


def test_with_usage_every_chunk_says_so_and_the_last_has_it() -> None:
    chunks = make(include_usage=True)
    chunks.open_choice(0)
    assert parse(chunks.text(0, "x"))["usage"] is None
    usage = parse(chunks.usage({"total_tokens": 3}))
    assert usage["choices"] == []
    assert usage["usage"] == {"total_tokens": 3}


def test_without_usage_no_chunk_mentions_it() -> None:
    chunks = make()
    chunks.open_choice(0)
    assert "usage" not in parse(chunks.text(0, "x"))


def test_an_error_is_an_event_too() -> None:
    assert parse(error_event({"error": {"message": "x"}})) == {"error": {"message": "x"}}
    assert DONE == b"data: [DONE]\n\n"


def test_log_probabilities_stand_where_null_stood() -> None:
    chunks = make()
    chunks.open_choice(0)
    assert parse(chunks.text(0, "x", {"content": [1]}))["choices"][0]["logprobs"] == {"content": [1]}
    (last,) = parse(chunks.end(0, "", "stop", {"content": []}))["choices"]
    assert last == {"index": 0, "delta": {}, "logprobs": {"content": []}, "finish_reason": "stop"}
    completions = make(chat=False)
    completions.open_choice(0)
    (choice,) = parse(completions.text(0, NASTY, {"tokens": [NASTY]}))["choices"]
    assert choice == {"index": 0, "text": NASTY, "logprobs": {"tokens": [NASTY]}, "finish_reason": None}
