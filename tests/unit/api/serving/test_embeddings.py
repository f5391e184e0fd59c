"""``/v1/embeddings`` and prompts of embeddings: what is accepted, and what an answer looks like."""

import base64
import json
import math
import struct
from typing import Any

import pytest
from pydantic import ValidationError

from engine.wire.errors import EngineError
from engine.wire.tensors import Tensor
from orchestrator.api.base.errors import to_api_error
from orchestrator.api.serving.protocol import CompletionRequest, EmbeddingRequest
from orchestrator.api.serving.response_builders import EmbeddingResponseBuilder
from orchestrator.llm.detokenizer import Detokenizer
from orchestrator.llm.embeds import shorten
from orchestrator.llm.stream import Choice, RequestStream
from orchestrator.llm.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
VECTOR = (0.6, 0.0, 0.8)


def embedding(**fields: Any) -> EmbeddingRequest:
    return EmbeddingRequest.model_validate_json(json.dumps({"model": "m", "input": "hi"} | fields))


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"model": "m"} | fields))


def tensor(values: tuple[float, ...] = VECTOR) -> Tensor:
    return Tensor("float32", (len(values),), struct.pack(f"<{len(values)}f", *values))


def make_stream(num_choices: int) -> RequestStream:
    choices = [
        Choice(
            index, request_id=index, sample_index=0, num_prompt_tokens=3, detokenizer=Detokenizer(TOKENIZER), stop=None
        )
        for index in range(num_choices)
    ]
    return RequestStream(choices, created_at=0.0)


def end(stream: RequestStream, index: int, pooled: Tensor | None, reason: str = "stop") -> None:
    choice = stream.choices[index]
    choice.pooled = pooled
    stream.end_choice(choice, "", reason)


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"input": None}, "input", "string"),
        ({"input": []}, "input", "string"),
        ({"input": ["a", 1]}, "input", "string"),
        ({"encoding_format": "int8"}, "encoding_format", "base64"),
        ({"dimensions": 0}, "dimensions", "1"),
        ({"dimensions": 1.5}, "dimensions", "integer"),
        ({"temperature": 1}, "temperature", "knows"),
        ({"data_parallel_rank": -1}, "data_parallel_rank", "0"),
        ({"priority": 0.5}, "priority", "integer"),
        ({"cache_salt": "mine"}, "cache_salt", "knows"),
    ],
)
def test_a_request_that_cannot_be_served_names_field_and_limit(fields: dict[str, Any], param: str, hint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        embedding(**fields)
    answer = to_api_error(caught.value)
    assert (answer.status, answer.param) == (400, param)
    assert hint in answer.message


def test_too_many_inputs_name_the_limit() -> None:
    assert len(embedding(input=["a"] * 2048).input) == 2048
    with pytest.raises(ValidationError, match="2048 is the limit"):
        embedding(input=["a"] * 2049)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_all_four_forms_of_an_input(given: Any, expected: list[Any]) -> None:
    assert embedding(input=given, user="me").input == expected


@pytest.mark.parametrize("prompt", [None, "", []])
def test_embeddings_take_the_place_of_a_prompt(prompt: Any) -> None:
    request = completion(prompt=prompt, prompt_embeds="AAAA")
    assert (request.prompt, request.prompt_embeds) == ([], ["AAAA"])
    assert completion(prompt_embeds=["AAAA", "BBBB"]).prompt_embeds == ["AAAA", "BBBB"]


def test_a_missing_prompt_is_named_and_keys_of_json_are_still_numbers() -> None:
    with pytest.raises(ValidationError) as caught:
        completion()
    assert to_api_error(caught.value).param == "prompt"
    assert completion(prompt="a", logit_bias={"5": 1}).logit_bias == {5: 1}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt_embeds": []}, "prompt"),
        ({"prompt": None, "prompt_embeds": None}, "prompt"),
        ({"prompt_embeds": ""}, "prompt"),
        ({"prompt_embeds": 7}, "prompt_embeds"),
        ({"prompt_embeds": [7]}, "prompt_embeds"),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, "exclude"),
        ({"prompt_embeds": ["AAAA"] * 100, "n": 11}, "1024"),
    ],
)
def test_prompts_have_one_form(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        completion(**fields)


# --- answers --------------------------------------------------------------------------------------------------------


def test_vectors_come_in_the_order_of_the_inputs_whenever_they_came() -> None:
    stream = make_stream(3)
    builder = EmbeddingResponseBuilder(stream, embedding(), "q")
    for index in (2, 0):
        end(stream, index, tensor((float(index),)))
        assert builder.take() == b""
        assert stream.choices[index].pooled is None, "what is in words need not be kept"
    end(stream, 1, tensor((1.0,)))
    body = json.loads(builder.take())
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": [float(index)]} for index in range(3)],
        "model": "m",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert builder.start["status"] == 200
    assert builder.finished
    assert builder.take() == b""


def test_base64_is_the_numbers_as_float32() -> None:
    stream = make_stream(1)
    builder = EmbeddingResponseBuilder(stream, embedding(encoding_format="base64"), "q")
    end(stream, 0, tensor())
    (item,) = json.loads(builder.take())["data"]
    assert base64.b64decode(item["embedding"]) == tensor().data


def test_fewer_dimensions_are_the_first_ones_of_length_one() -> None:
    stream = make_stream(1)
    builder = EmbeddingResponseBuilder(stream, embedding(dimensions=2), "q")
    end(stream, 0, tensor((0.3, 0.4, 0.866)))
    (item,) = json.loads(builder.take())["data"]
    assert item["embedding"] == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("dimensions", [None, 3, 7])
def test_a_vector_that_is_not_shortened_is_left_alone(dimensions: int | None) -> None:
    assert shorten(tensor((3.0, 0.0, 4.0)), dimensions).tolist() == [3.0, 0.0, 4.0]


def test_a_shortened_vector_without_a_direction_stays_finite() -> None:
    assert all(math.isfinite(value) for value in shorten(tensor((0.0, 0.0, 1.0)), 2))


def test_one_that_fails_fails_the_request() -> None:
    stream = make_stream(2)
    builder = EmbeddingResponseBuilder(stream, embedding(), "q")
    end(stream, 0, tensor())
    stream.fail(EngineError("broken"))
    assert json.loads(builder.take())["error"]["message"] == "broken"
    assert builder.start["status"] == 500


def test_an_aborted_request_is_no_answer_with_holes() -> None:
    stream = make_stream(2)
    builder = EmbeddingResponseBuilder(stream, embedding(), "q")
    end(stream, 0, tensor())
    end(stream, 1, None, "abort")
    assert "aborted" in json.loads(builder.take())["error"]["message"]
    assert builder.start["status"] == 503
