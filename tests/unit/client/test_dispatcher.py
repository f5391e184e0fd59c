"""Who has which sequence, with a sender that accepts or refuses as the test says."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from client.dispatcher import UNKNOWN_POSITION, Dispatcher
from client.engine_line import EngineLine
from engine.wire.errors import InvalidRequestError, OverloadedError
from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, EngineCoreOutput, FinishReason
from lb.picker import RotatingPicker
from tests.unit.client.builders import RecordingSender, make_add, make_batch, make_end, make_line


class _Group:
    def __init__(self, num_ranks: int) -> None:
        self.counts: Counter[str] = Counter()
        self.sender = RecordingSender()
        self.lines: dict[EngineId, EngineLine] = {}
        self.dispatcher = Dispatcher(self.lines, RotatingPicker(0), self.sender, self.counts)
        for rank in range(num_ranks):
            self.open(rank)

    def open(self, rank: int, incarnation: int = 1) -> EngineLine:
        line = make_line(rank, incarnation)
        self.lines[line.engine_id] = line
        self.dispatcher.refresh()
        return line

    def close(self, line: EngineLine) -> list[EngineCoreOutput]:
        del self.lines[line.engine_id]
        return self.dispatcher.on_line_closed(line, "gone")

    def hear(self, line: EngineLine, *outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
        batch = make_batch(line, *outputs)
        self.dispatcher.on_outputs(batch)
        return batch.outputs


def test_a_sequence_is_in_the_table_before_it_is_sent() -> None:
    group = _Group(1)
    seen = []
    send = group.sender.send_add

    def send_add(line: EngineLine, request: AddRequest) -> bool:
        seen.append(group.dispatcher.in_flight.get(request.request_id, request.sample_index))
        return send(line, request)

    group.sender.send_add = send_add  # type: ignore[method-assign]
    request = make_add(1)
    group.dispatcher.place(request)
    assert [entry.request for entry in seen if entry is not None] == [request]


def test_tokens_that_end_nothing_pass_untouched() -> None:
    group = _Group(1)
    request = make_add(1)
    line = group.dispatcher.place(request)
    token = EngineCoreOutput(1, 0, 0, 0, [5])
    assert group.hear(line, token) == [token]
    assert len(group.dispatcher.in_flight) == 1


def test_an_end_reaches_the_consumer_once_however_often_it_comes() -> None:
    group = _Group(1)
    request = make_add(1)
    line = group.dispatcher.place(request)
    assert group.hear(line, make_end(request)) == [make_end(request)]
    assert group.hear(line, make_end(request)) == []
    assert group.hear(line, make_end(make_add(99))) == []
    assert group.counts["unexpected_ends"] == 2


def test_an_end_of_another_attempt_is_not_the_end() -> None:
    group = _Group(1)
    request = make_add(1)
    line = group.dispatcher.place(request)
    assert group.hear(line, EngineCoreOutput(1, 0, 3, 0, [], FinishReason.STOP)) == []
    assert len(group.dispatcher.in_flight) == 1


def test_an_engine_that_refuses_is_no_candidate_and_another_is_picked() -> None:
    group = _Group(2)
    group.sender.refusing.add(EngineId(0, 1))
    lines = [group.dispatcher.place(make_add(i)) for i in range(3)]
    assert [line.engine_id.rank for line in lines] == [1, 1, 1]
    refused = group.lines[EngineId(0, 1)]
    assert (refused.num_unapplied, refused.ledger.num_unfinished, refused.ledger.num_picks) == (0, 0, 0)


def test_when_every_engine_refuses_the_request_is_refused_and_forgotten() -> None:
    group = _Group(2)
    group.sender.refusing.update(group.lines)
    with pytest.raises(OverloadedError):
        group.dispatcher.place(make_add(1))
    assert len(group.dispatcher.in_flight) == 0


def test_an_explicit_rank_gets_the_request_whatever_its_load() -> None:
    group = _Group(3)
    assert {group.dispatcher.place(make_add(i), 2).engine_id.rank for i in range(5)} == {2}


def test_an_explicit_rank_is_never_silently_another_one() -> None:
    group = _Group(2)
    with pytest.raises(InvalidRequestError, match="valid: 0, 1"):
        group.dispatcher.place(make_add(1), 5)
    group.lines[EngineId(1, 1)].leaving = True
    with pytest.raises(InvalidRequestError, match="valid: 0"):
        group.dispatcher.place(make_add(1), 1)
    group.sender.refusing.add(EngineId(0, 1))
    with pytest.raises(OverloadedError):
        group.dispatcher.place(make_add(1), 0)


def test_a_leaving_engine_gets_nothing_new() -> None:
    group = _Group(2)
    group.lines[EngineId(0, 1)].leaving = True
    group.dispatcher.refresh()
    assert {group.dispatcher.place(make_add(i)).engine_id.rank for i in range(4)} == {1}


def test_a_rerouted_sequence_is_picked_again_as_a_new_attempt_and_nobody_notices() -> None:
    group = _Group(2)
    request = make_add(1)
    first = group.dispatcher.place(request)
    assert group.hear(first, make_end(request, FinishReason.REROUTE)) == []
    assert [engine_id for engine_id, _ in group.sender.sent] == [EngineId(0, 1), EngineId(1, 1)]
    assert request.attempt == 1
    second = group.lines[EngineId(1, 1)]
    assert group.hear(second, make_end(request)) == [make_end(request)]


def test_a_reroute_with_nowhere_to_go_ends_with_an_error() -> None:
    group = _Group(1)
    request = make_add(1)
    line = group.dispatcher.place(request)
    (end,) = group.hear(line, make_end(request, FinishReason.REROUTE))
    assert end.finish_reason is FinishReason.ERROR
    assert end.first_position == UNKNOWN_POSITION
    assert len(group.dispatcher.in_flight) == 0


def test_a_reroute_of_an_explicit_rank_ends_with_an_error_that_names_it() -> None:
    group = _Group(2)
    request = make_add(1)
    line = group.dispatcher.place(request, 0)
    (end,) = group.hear(line, make_end(request, FinishReason.REROUTE))
    assert end.finish_reason is FinishReason.ERROR
    assert "rank 0" in (end.error or "")


def test_a_reroute_of_an_aborted_sequence_ends_it() -> None:
    group = _Group(2)
    request = make_add(1)
    line = group.dispatcher.place(request)
    group.dispatcher.abort(1)
    (end,) = group.hear(line, make_end(request, FinishReason.REROUTE))
    assert end.finish_reason is FinishReason.ABORT


def test_an_abort_goes_once_to_every_sample_wherever_it_runs() -> None:
    group = _Group(2)
    for sample_index in range(3):
        group.dispatcher.place(make_add(1, sample_index))
    group.dispatcher.abort(1, sample_index=1)
    group.dispatcher.abort(1)
    group.dispatcher.abort(1)
    group.dispatcher.abort(404)
    assert sorted(group.sender.aborted) == [(1, 0, 0), (1, 1, 0), (1, 2, 0)]
    assert len(group.dispatcher.in_flight) == 3  # until the engines have answered


def test_a_death_ends_what_the_engine_had_and_nothing_else() -> None:
    group = _Group(2)
    requests = [make_add(i) for i in range(6)]
    placed = {request.request_id: group.dispatcher.place(request) for request in requests}
    victim = group.lines[EngineId(0, 1)]
    ends = group.close(victim)
    assert {end.request_id for end in ends} == {i for i, line in placed.items() if line is victim}
    assert all(end.finish_reason is FinishReason.ERROR and end.error == "gone" for end in ends)
    assert len(group.dispatcher.in_flight) == 3


class DispatcherMachine(RuleBasedStateMachine):
    """Random life: requests of one or more samples, aborts, ends, reroutes, refusals, deaths, newcomers.

    ``owed`` is the model: every accepted sequence that has not been told its end, and how it must be found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.group = _Group(3)
        self.owed: dict[tuple[int, int], AddRequest] = {}
        self.told: Counter[tuple[int, int]] = Counter()
        self.next_id = 0
        self.incarnations = Counter({0: 1, 1: 1, 2: 1})

    def _tell(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            assert output.finish_reason not in (None, FinishReason.REROUTE)
            key = (output.request_id, output.sample_index)
            del self.owed[key]
            self.told[key] += 1

    def _any_owed(self, data: st.DataObject) -> AddRequest:
        return self.owed[data.draw(st.sampled_from(sorted(self.owed)))]

    def _line_of(self, request: AddRequest) -> EngineLine:
        sequence = self.group.dispatcher.in_flight.get(request.request_id, request.sample_index)
        assert sequence is not None
        return sequence.line

    @rule(num_samples=st.integers(1, 3), rank=st.none() | st.integers(0, 4))
    def add(self, num_samples: int, rank: int | None) -> None:
        self.next_id += 1
        for sample_index in range(num_samples):
            request = make_add(self.next_id, sample_index)
            try:
                self.group.dispatcher.place(request, rank)
            except (OverloadedError, InvalidRequestError):
                continue
            self.owed[self.next_id, sample_index] = request

    @precondition(lambda self: self.owed)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.group.dispatcher.abort(self._any_owed(data).request_id)

    @precondition(lambda self: self.owed)
    @rule(data=st.data(), reason=st.sampled_from(FinishReason), repeat=st.booleans(), report_seq=st.integers(1, 50))
    def end(self, data: st.DataObject, reason: FinishReason, repeat: bool, report_seq: int) -> None:
        request = self._any_owed(data)
        line = self._line_of(request)
        for end in [make_end(request, reason)] * (1 + repeat):
            batch = make_batch(line, end, report_seq=report_seq)
            self.group.dispatcher.on_outputs(batch)
            self._tell(batch.outputs)

    @rule(data=st.data())
    def refuse_or_accept(self, data: st.DataObject) -> None:
        self.group.sender.refusing = (
            data.draw(st.sets(st.sampled_from(sorted(self.group.lines)), max_size=2)) if (self.group.lines) else set()
        )
        for line in self.group.lines.values():
            line.blocked = False
        self.group.dispatcher.refresh()

    @precondition(lambda self: self.group.lines)
    @rule(data=st.data())
    def leave_or_return(self, data: st.DataObject) -> None:
        line = self.group.lines[data.draw(st.sampled_from(sorted(self.group.lines)))]
        line.leaving = not line.leaving
        self.group.dispatcher.refresh()

    @precondition(lambda self: self.group.lines)
    @rule(data=st.data(), refill=st.booleans())
    def kill(self, data: st.DataObject, refill: bool) -> None:
        line = self.group.lines[data.draw(st.sampled_from(sorted(self.group.lines)))]
        self._tell(self.group.close(line))
        if refill:
            rank = line.engine_id.rank
            self.incarnations[rank] += 1
            self.group.open(rank, self.incarnations[rank])

    @rule()
    def scale_up(self) -> None:
        rank = max((engine_id.rank for engine_id in self.group.lines), default=-1) + 1
        if rank < 6:
            self.incarnations[rank] += 1
            self.group.open(rank, self.incarnations[rank])

    @invariant()
    def the_table_holds_what_is_owed(self) -> None:
        table = self.group.dispatcher.in_flight
        assert len(table) == len(self.owed)
        assert all(table.get(*key) is not None for key in self.owed)

    @invariant()
    def the_ledgers_hold_what_the_table_holds(self) -> None:
        table = self.group.dispatcher.in_flight
        for line in self.group.lines.values():
            ledger = line.ledger
            assert ledger.num_unfinished == ledger.unfinished_cost == len(table.on_line(line))
            assert min(ledger.unapplied_cost, ledger.finished_cost, ledger.load(2)) >= 0

    @invariant()
    def nobody_is_told_twice(self) -> None:
        assert all(count == 1 for count in self.told.values())


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(max_examples=100, stateful_step_count=100)
