"""What is accepted, what is refused, and how the refusal names the field."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.api.base.errors import ApiError, to_api_error
from orchestrator.api.serving.protocol import ChatCompletionRequest, CompletionRequest
from orchestrator.llm.grammar import Grammar

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate_json(json.dumps({"model": "m", "messages": USER} | fields))


def complete(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"model": "m", "prompt": "hi"} | fields))


def refusal(call: Any, **fields: Any) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        call(**fields)
    answer = to_api_error(caught.value)
    assert answer.status == 400
    assert answer.kind == "invalid_request_error"
    return answer


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"n": 0}, "n", "1"),
        ({"n": 129}, "n", "128"),
        ({"n": "2"}, "n", "integer"),
        ({"n": True}, "n", "integer"),
        ({"temperature": 2.1}, "temperature", "2"),
        ({"temperature": -0.1}, "temperature", "0"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_p": 1.5}, "top_p", "1"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"min_p": 1.1}, "min_p", "1"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "1"),
        ({"min_tokens": -1}, "min_tokens", "0"),
        ({"seed": 2**63}, "seed", "9223372036854775808"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop": ""}, "stop[0]", "1"),
        ({"stop": [1]}, "stop[0]", "string"),
        ({"stop": ["x", "y" * 257]}, "stop[1]", "256"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "64"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "knows"),
        ({"data_parallel_rank": -1}, "data_parallel_rank", "0"),
        ({"priority": 1.5}, "priority", "integer"),
        ({"priority": True}, "priority", "integer"),
        ({"priority": "1"}, "priority", "integer"),
        ({"priority": 2**63}, "priority", "9223372036854775807"),
        ({"priority": -(2**63) - 1}, "priority", "-9223372036854775808"),
        ({"cache_salt": ""}, "cache_salt", "1"),
        ({"cache_salt": "x" * 257}, "cache_salt", "256"),
        ({"cache_salt": 7}, "cache_salt", "string"),
        ({"messages": []}, "messages", "1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "user"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "image_url",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood", "knows"),
        ({"repetition": 1}, "repetition", "knows"),
        ({"frequency_penalty": 2.1}, "frequency_penalty", "2"),
        ({"presence_penalty": -3}, "presence_penalty", "-2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0"),
        ({"repetition_penalty": 11}, "repetition_penalty", "10"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"logit_bias": {"50": 101}}, "logit_bias.50", "100"),
        ({"logit_bias": {"fish": 1}}, "logit_bias.fish.[key]", "integer"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "1024"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "1"),
        ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids", "4096"),
        ({"bad_words": ["x"] * 65}, "bad_words", "64"),
        ({"bad_words": [""]}, "bad_words[0]", "1"),
        ({"bad_words": ["x" * 257]}, "bad_words[0]", "256"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "regex"}}, "response_format", "regex"),
        ({"response_format": {"type": "text", "regex": "a"}}, "response_format", "regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            "response_format.json_schema.schema",
            "object",
        ),
        ({"guided_json": "{}"}, "guided_json", "object"),
        ({"guided_regex": ""}, "guided_regex", "1"),
        ({"store": True}, "store", "not supported"),
    ],
)
def test_a_chat_that_cannot_be_served_names_field_and_limit(fields: dict[str, Any], param: str, hint: str) -> None:
    answer = refusal(chat, **fields)
    assert answer.param == param
    assert param in answer.message
    assert hint in answer.message


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"prompt": 5}, "prompt", "string"),
        ({"prompt": []}, "prompt", "string"),
        ({"prompt": ["a", 1]}, "prompt", "string"),
        ({"prompt": [True]}, "prompt", "string"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"echo": "yes"}, "echo", "boolean"),
        ({"top_logprobs": 1}, "top_logprobs", "knows"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"messages": USER}, "messages", "knows"),
    ],
)
def test_a_completion_that_cannot_be_served_names_the_field(fields: dict[str, Any], param: str, hint: str) -> None:
    answer = refusal(complete, **fields)
    assert answer.param == param
    assert hint in answer.message


def test_too_many_choices_name_the_limit() -> None:
    answer = refusal(complete, prompt=["x"] * 100, n=100)
    assert "1024" in answer.message


def test_stream_options_without_a_stream_are_refused() -> None:
    assert "stream_options" in refusal(chat, stream_options={"include_usage": True}).message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"guided_regex": "a", "guided_grammar": "start: /a/"}, "guided_grammar"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_fields_that_exclude_each_other_are_named(fields: dict[str, Any], named: str) -> None:
    assert named in refusal(chat, **fields).message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": "m"', b"\xff\xfe", b'{"model": "\\ud800"}'])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate_json(body)
    assert to_api_error(caught.value).status == 400


def test_a_completion_may_ask_for_its_prompt_alone() -> None:
    assert complete(max_tokens=0, echo=True).to_params(None).max_tokens == 0
    assert complete(max_tokens=0, prompt_logprobs=1).to_params(None).max_tokens == 0
    assert "max_tokens is 0" in refusal(complete, max_tokens=0).message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate_json(b'{"model": "m"}')
    assert to_api_error(caught.value).param == "messages"


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": None, "logprobs": False},
        {"tools": None, "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False, "prompt_cache_key": "k"},
        {"n": None, "stop": None, "temperature": None, "top_p": None, "seed": None, "stream": None, "max_tokens": None},
        {"top_k": -1, "min_p": 0, "stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_what_clients_send_by_default_is_accepted(fields: dict[str, Any]) -> None:
    chat(**fields)


def test_an_answer_sent_back_as_history_is_accepted() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    messages = chat(messages=[*USER, answer, *USER]).messages
    assert messages[1].for_template() == {"role": "assistant", "content": "hello"}


def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = chat(messages=[{"role": "developer", "content": parts}]).messages
    assert message.for_template() == {"role": "system", "content": "a\nb"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_all_four_forms_of_a_prompt(prompt: Any, expected: list[Any]) -> None:
    assert complete(prompt=prompt).prompt == expected


def test_defaults_are_openais() -> None:
    params = chat().to_params(None)
    assert (params.n, params.temperature, params.top_p, params.max_tokens, params.seed) == (1, 1.0, 1.0, None, None)
    assert complete().to_params(None).default_max_tokens == 16


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).to_params(None).max_tokens == 7


def test_a_greedy_temperature_is_kept() -> None:
    assert chat(temperature=0).to_params(None).temperature == 0.0


def test_one_stop_string_and_several_are_the_same_to_the_engine() -> None:
    assert chat(stop="x").to_params(None).stop == ("x",)
    assert chat(stop=["x", "y"]).to_params(None).stop == ("x", "y")


def test_everything_asked_of_tokens_reaches_the_parameters() -> None:
    params = chat(
        presence_penalty=0.5,
        frequency_penalty=-2,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "9": 0.5},
        allowed_token_ids=[7, 8],
        bad_words=["cod"],
        prompt_logprobs=0,
    ).to_params(None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -2.0, 1.1)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ({7: -100.0, 9: 0.5}, (7, 8), ("cod",))
    assert params.prompt_logprobs == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_chats_ask_for_log_probabilities_with_two_fields(fields: dict[str, Any], expected: int | None) -> None:
    assert chat(**fields).to_params(None).logprobs == expected


def test_completions_ask_for_log_probabilities_with_a_number_and_may_echo() -> None:
    params = complete(logprobs=0, echo=True).to_params(None)
    assert (params.logprobs, params.echo) == (0, True)
    assert complete().to_params(None).logprobs is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_schema({"type": "object"})),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar.json_schema(SCHEMA),
        ),
        ({"response_format": {"type": "regex", "regex": "a+"}}, Grammar.regex("a+")),
        ({"response_format": {"type": "grammar", "grammar": "start: /a/"}}, Grammar.lark("start: /a/")),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA, "guided_json")),
        ({"guided_regex": "a+"}, Grammar.regex("a+", "guided_regex")),
        ({"guided_grammar": "start: /a/"}, Grammar.lark("start: /a/", "guided_grammar")),
    ],
)
def test_each_way_to_say_a_grammar(fields: dict[str, Any], expected: Grammar | None) -> None:
    assert chat(**fields).to_params(None).grammar == expected
    assert complete(**fields).to_params(None).grammar == expected


@pytest.mark.parametrize("call", [chat, complete])
def test_priority_and_salt_are_passed_on_and_have_vllms_defaults(call: Any) -> None:
    params = call(priority=-2, cache_salt="mine").to_params(None)
    assert (params.priority, params.cache_salt) == (-2, "mine")
    for nothing in ({}, {"priority": None, "cache_salt": None}):
        params = call(**nothing).to_params(None)
        assert (params.priority, params.cache_salt) == (0, None)


def test_half_a_character_is_no_salt() -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "hi"}], "cache_salt": "\\ud800"}'
    with pytest.raises(ValidationError):
        ChatCompletionRequest.model_validate_json(body)
