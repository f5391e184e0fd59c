"""Log-probabilities on their way up: which token, where in the text, and what comes with the prompt."""

import struct
from collections.abc import Sequence

import pytest

from engine.wire.logprobs import Logprobs
from engine.wire.messages import EngineCoreOutput, FinishReason
from orchestrator.llm.detokenizer import Detokenizer, StopChecker
from orchestrator.llm.logprobs import ChoiceLogprobs, TokenTexts
from orchestrator.llm.stream import Choice, RequestStream
from orchestrator.llm.tokenizer import byte_tokenizer
from tests.unit.llm.fed_processor import FedProcessor

TOKENIZER = byte_tokenizer()
TEXTS = TokenTexts(TOKENIZER.backend)
PROMPT = list(b"pq")


def logprobs(token_ids: Sequence[int], num_top: int = 2) -> Logprobs:
    """Give token t the log-probability -t / 4, and tokens 97, 98 ... as the best ones."""
    return Logprobs(
        num_top,
        struct.pack(f"<{len(token_ids)}f", *(-token / 4 for token in token_ids)),
        struct.pack(f"<{len(token_ids) * num_top}i", *[97 + index for _ in token_ids for index in range(num_top)]),
        struct.pack(f"<{len(token_ids) * num_top}f", *[-index - 0.5 for _ in token_ids for index in range(num_top)]),
    )


def output(text: str | bytes, finish: FinishReason | None = None, *, prompt: bool = False) -> EngineCoreOutput:
    token_ids = list(text.encode() if isinstance(text, str) else text)
    made = EngineCoreOutput(1, 0, 0, 0, token_ids, finish)
    made.logprobs = logprobs(token_ids)
    if prompt:
        made.prompt_logprobs = logprobs(PROMPT[1:])
    return made


def open_stream(
    fed: FedProcessor,
    *,
    outputs: int | None = 2,
    prompt: int | None = None,
    echo: bool = False,
    stop: str | None = None,
) -> RequestStream:
    choice = Choice(
        index=0,
        request_id=1,
        sample_index=0,
        num_prompt_tokens=len(PROMPT),
        detokenizer=Detokenizer(TOKENIZER),
        stop=StopChecker([stop]) if stop else None,
        echo="pq" if echo else "",
        logprobs=ChoiceLogprobs(
            TEXTS, PROMPT, outputs=outputs, prompt=prompt, echo=Detokenizer(TOKENIZER) if echo else None
        ),
    )
    stream = RequestStream([choice], created_at=fed.now)
    fed.processor.register(stream)
    return stream


def scores_of(stream: RequestStream) -> ChoiceLogprobs:
    logprobs = stream.choices[0].logprobs
    assert logprobs is not None
    return logprobs


def test_each_token_comes_with_its_place_its_own_and_the_best_ones() -> None:
    fed = FedProcessor()
    stream = open_stream(fed)
    fed.feed(output("x"))
    fed.feed(output("yz"))
    first, *others = scores_of(stream).take()
    assert (first.token.text, first.offset, first.logprob) == ("x", 0, -30.0)
    assert [(text.text, value) for _, text, value in first.top] == [("a", -0.5), ("b", -1.5)]
    assert [(token.token.text, token.offset) for token in others] == [("y", 1), ("z", 2)]
    assert stream.choices[0].take_text() == "xyz"
    assert scores_of(stream).take() == []
    assert scores_of(stream).prompt is None


def test_parts_of_a_character_share_its_place() -> None:
    fed = FedProcessor()
    stream = open_stream(fed)
    fed.feed(output("é".encode()[:1]))
    fed.feed(output("é".encode()[1:] + b"!"))
    assert [(token.token.data, token.offset) for token in scores_of(stream).take()] == [
        (b"\xc3", 0),
        (b"\xa9", 0),
        (b"!", 1),
    ]


def test_a_prompt_that_begins_the_text_comes_first_in_both() -> None:
    fed = FedProcessor()
    stream = open_stream(fed, outputs=1, echo=True)
    fed.feed(output("x", prompt=True))
    assert stream.choices[0].take_text() == "pqx"
    tokens = scores_of(stream).take()
    assert [(token.token.text, token.offset, token.logprob) for token in tokens] == [
        ("p", 0, None),
        ("q", 1, -28.25),
        ("x", 2, -30.0),
    ]
    assert [len(token.top) for token in tokens[:2]] == [0, 1], "no more of the best ones than were asked for"
    fed.feed(output("y", FinishReason.LENGTH))
    assert stream.choices[0].take_text() == "y"


def test_a_prompt_may_be_told_apart_from_the_text() -> None:
    fed = FedProcessor()
    stream = open_stream(fed, outputs=None, prompt=2)
    fed.feed(output("x", prompt=True))
    prompt = scores_of(stream).prompt
    assert prompt is not None
    assert [token.logprob for token in prompt] == [None, -28.25]
    assert scores_of(stream).take() == []
    assert stream.choices[0].take_text() == "x"


def test_an_end_without_a_token_brings_the_prompt_too() -> None:
    fed = FedProcessor()
    stream = open_stream(fed, prompt=1, echo=True)
    end = output("", FinishReason.STOP, prompt=True)
    end.logprobs = None
    fed.feed(end)
    assert stream.choices[0].take_text() == "pq"
    assert scores_of(stream).prompt is not None
    assert stream.finished


def test_an_error_brings_no_prompt() -> None:
    fed = FedProcessor()
    stream = open_stream(fed, echo=True)
    fed.feed(EngineCoreOutput(1, 0, 0, 0, [], FinishReason.ERROR, error="broken"))
    assert stream.error is not None
    assert stream.choices[0].take_text() == ""


def test_stop_strings_are_not_looked_for_in_the_prompt() -> None:
    fed = FedProcessor()
    stream = open_stream(fed, echo=True, stop="q")
    fed.feed(output("x", prompt=True))
    assert fed.processor.num_open == 1
    fed.feed(output("q"))
    assert stream.finished
    assert stream.choices[0].take_text() == "pqx"
    assert len(scores_of(stream).take()) == 4, "what was drawn is told, as its text was cut behind it"


def test_what_was_drawn_behind_a_stop_string_is_not_told() -> None:
    fed = FedProcessor()
    stream = open_stream(fed, stop="q")
    fed.feed(output("xqyz"))
    assert [token.token.text for token in scores_of(stream).take()] == ["x", "q"]
    assert stream.num_output_tokens == 2


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_numbers_that_do_not_fit_the_tokens_end_that_request_alone(num_tokens: int) -> None:
    fed = FedProcessor()
    stream = open_stream(fed)
    wrong = output("x")
    wrong.logprobs = logprobs([120] * num_tokens)
    fed.feed(wrong)
    assert stream.error is not None
