"""Log-probabilities in the shapes OpenAI's and vLLM's clients read, whole and streamed."""

import json
import struct
from dataclasses import replace
from typing import Any

from engine.wire.ids import ClientId, EngineId
from engine.wire.logprobs import Logprobs
from engine.wire.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from metrics.stats import ServingStats
from orchestrator.api.serving.response_builders import (
    JsonResponseBuilder,
    ResponseHead,
    StreamResponseBuilder,
    completion_logprobs,
)
from orchestrator.llm.detokenizer import Detokenizer
from orchestrator.llm.logprobs import ChoiceLogprobs, TokenLogprob, TokenText, TokenTexts
from orchestrator.llm.outputs import OutputProcessor
from orchestrator.llm.stream import Choice, RequestStream
from orchestrator.llm.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
CHAT = ResponseHead(response_id="r", request_id="q", created=1, model="m", chat=True)
COMPLETION = replace(CHAT, chat=False)
A = {"token": "a", "logprob": -0.5, "bytes": [97]}
X = {"token": "x", "logprob": -2.0, "bytes": [120]}


class Answer:
    """One choice whose tokens are scored: -2 for itself, -0.5 for the letter a."""

    def __init__(self, *, prompt: int | None = None, echo: bool = False) -> None:
        choice = Choice(
            index=0,
            request_id=1,
            sample_index=0,
            num_prompt_tokens=2,
            detokenizer=Detokenizer(TOKENIZER),
            stop=None,
            echo="pq" if echo else "",
            logprobs=ChoiceLogprobs(
                TokenTexts(TOKENIZER.backend),
                list(b"pq"),
                outputs=1,
                prompt=prompt,
                echo=Detokenizer(TOKENIZER) if echo else None,
            ),
        )
        self.stream = RequestStream([choice], created_at=0.0)
        self._processor = OutputProcessor(ServingStats())
        self._processor.register(self.stream)
        self._is_first = True

    def say(self, text: str, finish: FinishReason | None = None) -> None:
        output = EngineCoreOutput(1, 0, 0, 0, list(text.encode()), finish)
        output.logprobs = scored(len(text))
        output.prompt_logprobs = scored(1) if self._is_first else None
        self._is_first = False
        self._processor.process(EngineCoreOutputs(EngineId(0, 1), ClientId(0, 1), 1, 0, 0, [output]), 1.0)


def scored(count: int) -> Logprobs:
    return Logprobs(
        1,
        struct.pack(f"<{count}f", *[-2.0] * count),
        struct.pack(f"<{count}i", *[97] * count),
        struct.pack(f"<{count}f", *[-0.5] * count),
    )


def choices(body: bytes) -> list[Any]:
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    return [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]


def test_a_chat_tells_each_token_with_its_bytes_and_the_best_ones() -> None:
    answer = Answer()
    answer.say("xa", FinishReason.LENGTH)
    (choice,) = json.loads(JsonResponseBuilder(answer.stream, CHAT).take())["choices"]
    assert choice["logprobs"] == {
        "content": [X | {"top_logprobs": [A]}, A | {"logprob": -2.0, "top_logprobs": [A]}],
        "refusal": None,
    }


def test_a_streamed_chat_tells_with_each_text_what_belongs_to_it() -> None:
    answer = Answer()
    builder = StreamResponseBuilder(answer.stream, CHAT)
    answer.say("x")
    opening, first = choices(builder.take())
    assert opening["logprobs"] is None
    assert first["logprobs"]["content"] == [X | {"top_logprobs": [A]}]
    answer.say("x")
    (second,) = choices(builder.take())
    assert second["logprobs"]["content"] == [X | {"top_logprobs": [A]}]
    answer.say("x", FinishReason.STOP)
    (last,) = choices(builder.take())
    assert len(last["logprobs"]["content"]) == 1
    assert last["finish_reason"] == "stop"


def test_a_completion_has_four_lists_and_the_prompt_when_echoed() -> None:
    answer = Answer(echo=True)
    answer.say("x", FinishReason.LENGTH)
    (choice,) = json.loads(JsonResponseBuilder(answer.stream, COMPLETION).take())["choices"]
    assert choice == {
        "index": 0,
        "text": "pqx",
        "logprobs": {
            "tokens": ["p", "q", "x"],
            "token_logprobs": [None, -2.0, -2.0],
            "top_logprobs": [None, {"a": -0.5, "q": -2.0}, {"a": -0.5, "x": -2.0}],
            "text_offset": [0, 1, 2],
        },
        "finish_reason": "length",
    }


def test_a_streamed_completion_goes_on_counting_where_the_last_part_ended() -> None:
    answer = Answer(echo=True)
    builder = StreamResponseBuilder(answer.stream, COMPLETION)
    answer.say("x")
    (first,) = choices(builder.take())
    assert (first["text"], first["logprobs"]["text_offset"]) == ("pqx", [0, 1, 2])
    answer.say("y", FinishReason.LENGTH)
    (last,) = choices(builder.take())
    assert (last["text"], last["logprobs"]["text_offset"]) == ("y", [3])


def test_prompt_log_probabilities_stand_in_a_completions_choice_and_beside_a_chats() -> None:
    expected = [None, {"97": {"logprob": -0.5, "decoded_token": "a"}, "113": {"logprob": -2.0, "decoded_token": "q"}}]
    for head in (COMPLETION, CHAT):
        answer = Answer(prompt=1)
        answer.say("x", FinishReason.LENGTH)
        body = json.loads(JsonResponseBuilder(answer.stream, head).take())
        holder = body if head.chat else body["choices"][0]
        assert holder["prompt_logprobs"] == expected


def test_what_is_impossible_has_a_number_json_knows() -> None:
    token = TokenLogprob(1, TokenText("x", b"x"), 0, float("-inf"), [(2, TokenText("y", b"y"), float("-inf"))])
    told = completion_logprobs([token])
    assert told["token_logprobs"] == [-9999.0]
    assert told["top_logprobs"] == [{"y": -9999.0, "x": -9999.0}]


def test_of_two_best_tokens_that_look_alike_the_better_one_counts() -> None:
    part = "\N{REPLACEMENT CHARACTER}"
    alike = [(2, TokenText(part, b"\xc3"), -0.5), (3, TokenText(part, b"\xe2"), -1.5), (4, TokenText("z", b"z"), -3.0)]
    (top,) = completion_logprobs([TokenLogprob(1, TokenText("x", b"x"), 0, -9.0, alike)])["top_logprobs"]
    assert top == {part: -0.5, "z": -3.0, "x": -9.0}
    assert list(top) == [part, "z", "x"], "best first"
