"""Who has which sequence, with a sender that accepts or refuses as the test says."""

import pytest

from client.engine_connection import EngineConnection
from client.sequences import UNKNOWN_POSITION
from engine.wire.errors import InvalidRequestError, OverloadedError
from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, EngineCoreOutput, ErrorKind, FinishReason
from tests.unit.client.builders import make_add, make_end
from tests.unit.client.group import Group


def test_a_sequence_is_in_the_table_before_it_is_sent() -> None:
    group = Group(1)
    seen = []
    send = group.sender.send_add

    def send_add(connection: EngineConnection, request: AddRequest) -> bool:
        seen.append(group.dispatcher.in_flight.get(request.request_id, request.sample_index))
        return send(connection, request)

    group.sender.send_add = send_add  # type: ignore[method-assign]
    request = make_add(1)
    group.dispatcher.route(request)
    assert [entry.request for entry in seen if entry is not None] == [request]


def test_tokens_that_end_nothing_pass_untouched() -> None:
    group = Group(1)
    request = make_add(1)
    connection = group.dispatcher.route(request)
    token = EngineCoreOutput(1, 0, 0, 0, [5])
    assert group.hear(connection, token) == [token]
    assert len(group.dispatcher.in_flight) == 1


def test_an_end_reaches_the_consumer_once_however_often_it_comes() -> None:
    group = Group(1)
    request = make_add(1)
    connection = group.dispatcher.route(request)
    assert group.hear(connection, make_end(request)) == [make_end(request)]
    assert group.hear(connection, make_end(request)) == []
    assert group.hear(connection, make_end(make_add(99))) == []
    assert group.counts["unexpected_outputs"] == 2


def test_an_end_of_another_attempt_is_not_the_end() -> None:
    group = Group(1)
    request = make_add(1)
    connection = group.dispatcher.route(request)
    assert group.hear(connection, EngineCoreOutput(1, 0, 3, 0, [], FinishReason.STOP)) == []
    assert len(group.dispatcher.in_flight) == 1


def test_an_engine_that_refuses_is_no_candidate_and_another_is_picked() -> None:
    group = Group(2)
    group.sender.refusing.add(EngineId(0, 1))
    connections = [group.dispatcher.route(make_add(i)) for i in range(3)]
    assert [connection.engine_id.rank for connection in connections] == [1, 1, 1]
    refused = group.connections[EngineId(0, 1)]
    assert (refused.num_unapplied, refused.ledger.num_unfinished, refused.ledger.num_picks) == (0, 0, 0)


def test_when_every_engine_refuses_the_request_is_refused_and_forgotten() -> None:
    group = Group(2)
    group.sender.refusing.update(group.connections)
    with pytest.raises(OverloadedError):
        group.dispatcher.route(make_add(1))
    assert len(group.dispatcher.in_flight) == 0


def test_an_explicit_rank_gets_the_request_whatever_its_load() -> None:
    group = Group(3)
    assert {group.dispatcher.route(make_add(i), 2).engine_id.rank for i in range(5)} == {2}


def test_an_explicit_rank_is_never_silently_another_one() -> None:
    group = Group(2)
    with pytest.raises(InvalidRequestError, match="valid: 0, 1"):
        group.dispatcher.route(make_add(1), 5)
    group.connections[EngineId(1, 1)].leaving = True
    with pytest.raises(InvalidRequestError, match="valid: 0"):
        group.dispatcher.route(make_add(1), 1)
    group.sender.refusing.add(EngineId(0, 1))
    with pytest.raises(OverloadedError):
        group.dispatcher.route(make_add(1), 0)


def test_a_suspect_gets_nothing_new_and_whoever_names_it_is_told_to_come_back() -> None:
    group = Group(2)
    group.connections[EngineId(0, 1)].suspect = True
    group.dispatcher.refresh()
    assert {group.dispatcher.route(make_add(i)).engine_id.rank for i in range(4)} == {1}
    with pytest.raises(OverloadedError):
        group.dispatcher.route(make_add(9), 0)
    with pytest.raises(InvalidRequestError, match="valid: 0, 1"):
        group.dispatcher.route(make_add(9), 2)


def test_a_cordoned_rank_gets_nothing_new_and_is_not_among_the_valid_ones() -> None:
    group = Group(2)
    group.connections[EngineId(0, 1)].cordoned = True
    group.dispatcher.refresh()
    assert {group.dispatcher.route(make_add(i)).engine_id.rank for i in range(4)} == {1}
    with pytest.raises(InvalidRequestError, match="valid: 1"):
        group.dispatcher.route(make_add(9), 0)


def test_a_sequence_that_an_engine_runs_for_nobody_is_freed_there_once() -> None:
    group = Group(1)
    (connection,) = group.connections.values()
    for position in range(3):
        assert group.hear(connection, EngineCoreOutput(404, 1, 2, position, [5])) == []
    assert group.sender.aborted == [(404, 1, 2)]


def test_a_leaving_engine_gets_nothing_new() -> None:
    group = Group(2)
    group.connections[EngineId(0, 1)].leaving = True
    group.dispatcher.refresh()
    assert {group.dispatcher.route(make_add(i)).engine_id.rank for i in range(4)} == {1}


def test_a_rerouted_sequence_is_picked_again_as_a_new_attempt_and_nobody_notices() -> None:
    group = Group(2)
    request = make_add(1)
    first = group.dispatcher.route(request)
    assert group.hear(first, make_end(request, FinishReason.REROUTE)) == []
    assert [engine_id for engine_id, _ in group.sender.sent] == [EngineId(0, 1), EngineId(1, 1)]
    assert request.attempt == 1
    second = group.connections[EngineId(1, 1)]
    assert group.hear(second, make_end(request)) == [make_end(request)]


def test_a_reroute_of_an_explicit_rank_that_never_took_it_ends_with_an_error_that_names_it() -> None:
    group = Group(2)
    request = make_add(1)
    connection = group.dispatcher.route(request, 0)
    (end,) = group.hear(connection, make_end(request, FinishReason.REROUTE))
    assert end.finish_reason is FinishReason.ERROR
    assert end.first_position == UNKNOWN_POSITION
    assert "rank 0" in (end.error or "")
    assert end.error_kind is ErrorKind.REQUEST
    assert len(group.dispatcher.in_flight) == 0


def test_a_reroute_of_an_aborted_sequence_ends_it() -> None:
    group = Group(2)
    request = make_add(1)
    connection = group.dispatcher.route(request)
    group.dispatcher.abort(1)
    (end,) = group.hear(connection, make_end(request, FinishReason.REROUTE))
    assert end.finish_reason is FinishReason.ABORT


def test_an_abort_goes_once_to_every_sample_wherever_it_runs() -> None:
    group = Group(2)
    for sample_index in range(3):
        group.dispatcher.route(make_add(1, sample_index))
    group.dispatcher.abort(1, sample_index=1)
    group.dispatcher.abort(1)
    group.dispatcher.abort(1)
    group.dispatcher.abort(404)
    assert sorted(group.sender.aborted) == [(1, 0, 0), (1, 1, 0), (1, 2, 0)]
    assert len(group.dispatcher.in_flight) == 3  # until the engines have answered
