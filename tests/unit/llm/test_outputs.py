"""What becomes of an engine's outputs: text, ends, errors and counts."""

import pytest

from engine.wire.errors import EngineDeadError, EngineError, InvalidRequestError
from engine.wire.messages import EngineCoreOutput, ErrorKind, FinishReason
from orchestrator.llm.stream import RequestStream
from tests.unit.llm.fed_processor import RANK, FedProcessor


def say(
    text: str, finish: FinishReason | None = None, *, request_id: int = 1, sample: int = 0, error: str | None = None
) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, sample, 0, 0, list(text.encode()), finish, error=error)


def read(stream: RequestStream) -> list[tuple[int, str, str | None]]:
    return [(choice.index, choice.take_text(), choice.finish_reason) for choice in stream.take()]


def test_tokens_become_text_and_the_end_its_reason() -> None:
    fed = FedProcessor()
    stream = fed.open()
    assert fed.feed(say("a")) == []
    assert fed.feed(say("b", FinishReason.LENGTH)) == []
    assert read(stream) == [(0, "ab", "length")]
    assert fed.processor.num_open == 0


def test_a_stop_string_ends_the_choice_here_and_its_engine_is_told() -> None:
    fed = FedProcessor()
    stream = fed.open(stop=["END"])
    assert fed.feed(say("x E")) == []
    assert fed.feed(say("ND y")) == [(1, 0)]
    assert read(stream) == [(0, "x ", "stop")]


@pytest.mark.parametrize("pieces", [["x END y"], ["x E", "ND y"], [*"x END y"]])
def test_what_counts_does_not_depend_on_how_tokens_came(pieces: list[str]) -> None:
    """Outputs that wait for a slow reader are merged, and the engine goes on until it hears of the stop."""
    fed = FedProcessor()
    stream = fed.open(stop=["END"])
    (choice,) = stream.choices
    choice.token_ids = []
    for piece in pieces:
        fed.feed(say(piece))
    assert read(stream) == [(0, "x ", "stop")]
    assert (stream.num_output_tokens, choice.token_ids) == (5, list(b"x END"))


def test_an_engine_that_ended_by_itself_is_not_told() -> None:
    fed = FedProcessor()
    fed.open(stop=["END"])
    assert fed.feed(say("END", FinishReason.LENGTH)) == []


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    fed = FedProcessor()
    stream = fed.open(stop=["END"])
    fed.feed(say("x EN"))
    fed.feed(say("", FinishReason.STOP))
    assert read(stream) == [(0, "x EN", "stop")]


def test_one_sample_that_stops_leaves_its_siblings_running() -> None:
    fed = FedProcessor()
    stream = fed.open(num_choices=2, stop=["END"])
    assert fed.feed(say("END", sample=1), say("a", sample=0)) == [(1, 1)]
    assert not stream.finished
    fed.feed(say("b", FinishReason.STOP, sample=0))
    assert stream.finished


def test_an_end_without_a_token_counts_for_the_rank_that_told_it() -> None:
    fed = FedProcessor()
    fed.open()
    fed.feed(say("", FinishReason.LENGTH))
    assert fed.stats.ranks[RANK].e2e.cumulative()[-1][1] == 1
    assert set(fed.stats.ranks) == {RANK}


def test_an_error_says_whose_fault_it_is() -> None:
    for kind, expected in ((ErrorKind.ENGINE, EngineError), (ErrorKind.REQUEST, InvalidRequestError)):
        fed = FedProcessor()
        stream = fed.open()
        output = say("", FinishReason.ERROR, error="no")
        output.error_kind = kind
        fed.feed(output)
        assert type(stream.error) is expected


def test_what_cannot_be_served_as_asked_counts_as_the_callers_not_as_an_error() -> None:
    fed = FedProcessor()
    fed.open(num_choices=2)
    output = say("", FinishReason.ERROR, error="a token that this model does not have")
    output.error_kind = ErrorKind.REQUEST
    assert fed.feed(output) == [(1, 1)]
    assert (fed.stats.finished["reject"], fed.stats.finished["error"]) == (2, 0)


@pytest.mark.parametrize(
    ("finish", "queue_time_s", "num_prompt"),
    [
        (FinishReason.LENGTH, 0.01, 2),  # it was there for the scores of its prompt, or for a vector
        (FinishReason.STOP, 0.01, 2),  # its first token was a stop token
        (FinishReason.ABORT, 0.01, 0),  # in the middle of its prompt, maybe
        (FinishReason.LENGTH, None, 0),  # nothing was wanted of it, so it never ran
    ],
)
def test_a_prompt_counts_once_it_was_read_also_when_no_token_follows(
    finish: FinishReason, queue_time_s: float | None, num_prompt: int
) -> None:
    fed = FedProcessor()
    stream = fed.open()
    output = say("", finish)
    output.queue_time_s, output.num_cached_tokens = queue_time_s, 1
    fed.feed(output)
    assert fed.stats.ranks[RANK].num_prompt == num_prompt
    assert stream.num_cached_tokens == num_prompt // 2


def test_an_error_ends_the_whole_request_once_and_frees_the_siblings() -> None:
    fed = FedProcessor()
    stream = fed.open(num_choices=3)
    fed.feed(say("a", FinishReason.STOP, sample=2))
    assert fed.feed(say("", FinishReason.ERROR, sample=0, error="no memory")) == [(1, 1)]
    assert stream.finished
    assert str(stream.error) == "no memory"
    fed.feed(say("late", FinishReason.STOP, sample=1))
    assert str(stream.error) == "no memory"


def test_a_reroute_is_no_end() -> None:
    fed = FedProcessor()
    stream = fed.open()
    fed.feed(say("", FinishReason.REROUTE))
    assert not stream.finished
    assert fed.processor.num_open == 1


def test_outputs_for_a_choice_that_ended_are_counted_and_dropped() -> None:
    fed = FedProcessor()
    fed.feed(say("a", request_id=99))
    assert fed.processor.num_unknown == 1


def test_the_reader_is_told_once_per_batch() -> None:
    fed = FedProcessor()
    stream = fed.open(num_choices=2)
    calls: list[None] = []
    stream.attach(lambda: calls.append(None))
    fed.feed(say("a", sample=0), say("b", sample=1), say("c", sample=0))
    assert calls == [None]


def test_a_reader_that_fails_costs_only_its_own_request() -> None:
    fed = FedProcessor()
    broken, fine = fed.open(1), fed.open(2)

    def fail() -> None:
        raise RuntimeError("no more")

    broken.attach(fail)
    assert fed.feed(say("a", request_id=1), say("a", request_id=2)) == [(1, 0)]
    assert broken.error is not None
    assert read(fine) == [(0, "a", None)]


def test_an_output_that_cannot_be_processed_costs_only_its_own_request() -> None:
    fed = FedProcessor()
    broken, fine = fed.open(1), fed.open(2)
    bad = EngineCoreOutput(1, 0, 0, 0, [-1])
    assert fed.feed(bad, say("a", request_id=2)) == [(1, 0)]
    assert broken.error is not None
    assert read(fine) == [(0, "a", None)]


def test_finishing_from_outside_gives_what_is_there_and_names_what_still_runs() -> None:
    fed = FedProcessor()
    stream = fed.open(num_choices=2)
    fed.feed(say("a", sample=0), say("b", FinishReason.STOP, sample=1))
    assert fed.processor.finish(stream, "abort", fed.now) == [(1, 0)]
    assert read(stream) == [(0, "a", "abort"), (1, "b", "stop")]
    assert fed.processor.finish(stream, "abort", fed.now) == []


def test_the_death_of_the_line_ends_every_stream() -> None:
    fed = FedProcessor()
    streams = [fed.open(1), fed.open(2)]
    fed.processor.fail_all(EngineDeadError(), fed.now)
    assert all(stream.finished and stream.error for stream in streams)
    assert fed.processor.num_open == 0


def test_a_stream_that_could_not_be_sent_is_forgotten_without_a_trace() -> None:
    fed = FedProcessor()
    stream = fed.open(num_choices=2)
    assert fed.processor.forget(stream) == [(1, 0), (1, 1)]
    assert fed.processor.num_open == 0
    assert sum(fed.stats.finished.values()) == 0


def test_times_and_counts_reach_the_statistics() -> None:
    fed = FedProcessor()
    fed.open(1)
    fed.open(2)
    fed.feed(say("a", request_id=1), say("a", request_id=2))
    fed.feed(say("b", request_id=1), say("bcd", request_id=2))
    fed.feed(say("c", FinishReason.STOP, request_id=1))
    rank = fed.stats.ranks[RANK]
    assert rank.num_generated == 7
    assert rank.first_token.cumulative()[-1][1] == 2
    assert rank.inter_token.cumulative()[-1][1] == 5
    assert rank.inter_token.total == pytest.approx(0.5 + 0.5 + 0.5)
    assert fed.stats.finished["stop"] == 1
