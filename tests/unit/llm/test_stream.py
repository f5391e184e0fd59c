"""One request on its way back: its text, its readers and its one end."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from engine.wire.errors import EngineError
from orchestrator.llm.detokenizer import Detokenizer
from orchestrator.llm.stream import Choice, RequestStream
from orchestrator.llm.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def make_stream(num_choices: int = 1) -> RequestStream:
    choices = [
        Choice(
            index=index,
            request_id=1,
            sample_index=index,
            num_prompt_tokens=3,
            detokenizer=Detokenizer(TOKENIZER),
            stop=None,
        )
        for index in range(num_choices)
    ]
    return RequestStream(choices, created_at=0.0)


def test_what_a_slow_reader_left_is_one_piece() -> None:
    stream = make_stream()
    choice = stream.choices[0]
    for text in ("a", "b", "c"):
        stream.add_text(choice, text)
    assert stream.take() == [choice]
    assert choice.take_text() == "abc"
    assert stream.take() == []


def test_the_stream_ends_with_its_last_choice() -> None:
    stream = make_stream(2)
    assert stream.end_choice(stream.choices[1], "", "stop")
    assert not stream.finished
    assert stream.end_choice(stream.choices[0], "", "length")
    assert stream.finished


@given(st.lists(st.sampled_from(["end 0", "end 1", "fail"]), max_size=8))
def test_exactly_one_end_whatever_comes(events: list[str]) -> None:
    """Each choice is ended at most once, and an error ends the stream only when it had not ended."""
    stream = make_stream(2)
    ended: list[str] = []
    for event in events:
        had_finished = stream.finished
        if event == "fail":
            accepted = stream.fail(EngineError("broken"))
            assert accepted is not had_finished
        else:
            choice = stream.choices[int(event[-1])]
            accepted = stream.end_choice(choice, "", "stop")
            assert accepted is (not had_finished and event not in ended)
        if accepted:
            ended.append(event)
        if had_finished:
            assert stream.finished
    assert len(set(ended)) == len(ended)
    assert stream.finished == ("fail" in ended or {"end 0", "end 1"} <= set(ended))


def test_a_reader_that_comes_late_is_told_at_once() -> None:
    stream = make_stream()
    stream.end_choice(stream.choices[0], "x", "stop")
    calls: list[None] = []
    stream.attach(lambda: calls.append(None))
    assert calls == [None]


def test_a_detached_reader_hears_nothing() -> None:
    stream = make_stream()
    calls: list[None] = []
    stream.attach(lambda: calls.append(None))
    stream.detach()
    stream.notify()
    assert calls == []


async def test_the_wait_for_the_end_takes_nothing() -> None:
    stream = make_stream()
    waiting = asyncio.create_task(stream.wait_finished())
    await asyncio.sleep(0)
    stream.add_text(stream.choices[0], "a")
    stream.notify()
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.end_choice(stream.choices[0], "b", "length")
    stream.notify()
    await waiting
    assert stream.choices[0].take_text() == "ab"


async def test_an_error_leaves_the_text_that_came_before_it() -> None:
    stream = make_stream()
    stream.add_text(stream.choices[0], "a")
    stream.fail(EngineError("broken"))
    await stream.wait_finished()
    assert (stream.take(), str(stream.error)) == ([stream.choices[0]], "broken")
    assert (stream.choices[0].take_text(), stream.choices[0].finish_reason) == ("a", None)


def test_samples_of_one_prompt_share_its_tokens_in_the_usage() -> None:
    stream = make_stream(3)
    assert stream.num_prompt_tokens == 3
