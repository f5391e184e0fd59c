"""What happens to a sequence whose engine dies, loses outputs, begins anew or gives it back."""

from client.engine_connection import EngineConnection
from client.migration import MigrationConfig
from client.sequences import MigrationReason
from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, FinishReason
from tests.unit.client.builders import make_add, make_end, make_tokens
from tests.unit.client.group import Group


def connection_of(group: Group, request: AddRequest) -> EngineConnection:
    sequence = group.dispatcher.in_flight.get(request.request_id, request.sample_index)
    assert sequence is not None
    assert sequence.placement is not None
    return sequence.placement.connection


def test_a_death_moves_what_the_engine_had_behind_its_last_token_and_touches_nothing_else() -> None:
    group = Group(2)
    requests = [make_add(i) for i in range(6)]
    placed = {request.request_id: group.dispatcher.route(request) for request in requests}
    victim, survivor = group.connections[EngineId(0, 1)], group.connections[EngineId(1, 1)]
    moved = [request for request in requests if placed[request.request_id] is victim]
    for request in moved:
        assert group.hear(victim, make_tokens(request, 0, 7, 8)) == [make_tokens(request, 0, 7, 8)]
    del group.sender.sent[:]
    assert group.close(victim) == []
    assert [(engine_id, m.request_id, m.output_token_ids, m.attempt) for engine_id, m in group.sender.added] == [
        (survivor.engine_id, request.request_id, [7, 8], 1) for request in moved
    ]
    assert group.counts["moves_death"] == 3
    assert survivor.ledger.num_unfinished == 6


def test_what_the_old_attempt_still_says_reaches_nobody() -> None:
    group = Group(2)
    request = make_add(1)
    first = group.dispatcher.route(request)
    late = [make_tokens(request, 0, 7), make_end(request)]
    group.close(first)
    second = connection_of(group, request)
    assert group.hear(second, *late) == []
    tokens = make_tokens(request, 0, 7)
    assert group.hear(second, tokens) == [tokens]
    assert group.hear(second, tokens) == []  # a repetition begins where there are tokens already
    assert group.counts["unexpected_outputs"] == 3


def test_a_hole_in_the_tokens_resumes_the_sequence_though_no_frame_is_missing() -> None:
    group = Group(1)
    request = make_add(1)
    connection = group.dispatcher.route(request)
    group.hear(connection, make_tokens(request, 0, 5))
    assert group.hear(connection, make_tokens(request, 3, 8)) == []
    assert group.sender.aborted == [(1, 0, 0)]
    assert group.sender.added[-1][1].output_token_ids == [5]


def test_a_gap_resumes_what_was_applied_and_aborts_it_where_it_was() -> None:
    group = Group(2)
    spoken_of, not_applied = make_add(1), make_add(2)
    connection = group.dispatcher.route(spoken_of, 0)
    group.dispatcher.route(not_applied, 0)
    assert group.hear(connection, make_tokens(spoken_of, 1, 6), is_gap=True, applied=1) == []
    assert group.sender.aborted == [(1, 0, 0)]
    assert (spoken_of.attempt, not_applied.attempt) == (1, 0)
    assert [m.attempt for _, m in group.sender.added] == [0, 0, 1]
    assert sum(connection.ledger.num_unfinished for connection in group.connections.values()) == 2


def test_tokens_that_come_with_a_reroute_reach_the_consumer() -> None:
    group = Group(2)
    request = make_add(1)
    connection = group.dispatcher.route(request)
    merged = make_tokens(request, 0, 5, 6)
    merged.finish_reason = FinishReason.REROUTE
    (tokens,) = group.hear(connection, merged)
    assert (tokens.new_token_ids, tokens.finish_reason) == ([5, 6], None)
    assert group.sender.added[-1][1].output_token_ids == [5, 6]


def test_prompt_logprobs_are_asked_for_until_they_came_with_the_first_token() -> None:
    group = Group(3)
    request = make_add(1, num_prompt_logprobs=2)
    group.dispatcher.route(request)
    group.close(connection_of(group, request))
    assert group.sender.added[-1][1].sampling.num_prompt_logprobs == 2
    group.hear(connection_of(group, request), make_tokens(request, 0, 5))
    group.close(connection_of(group, request))
    assert group.sender.added[-1][1].sampling.num_prompt_logprobs is None


def test_two_deaths_in_a_row_before_a_token_end_a_sequence_with_an_error_that_says_so() -> None:
    group = Group(3)
    request = make_add(1)
    group.dispatcher.route(request)
    assert group.close(connection_of(group, request)) == []
    (end,) = group.close(connection_of(group, request))
    assert end.finish_reason is FinishReason.ERROR
    assert "two engines in a row died" in (end.error or "")
    assert (len(group.dispatcher.in_flight), group.counts["poison_ends"]) == (0, 1)


def test_engines_that_die_in_the_same_moment_are_one_crash_of_a_sequence() -> None:
    group = Group(4, MigrationConfig(suspect_rest_s=0.3))
    request = make_add(1)
    group.dispatcher.route(request, 0)
    for rank in range(3):  # their deaths become known one after another
        assert group.close(group.connections[EngineId(rank, 1)]) == []
        group.dispatcher.on_time(0.1 * rank)
        assert group.settle() == []
    group.dispatcher.on_time(0.3)
    assert group.settle() == []
    assert connection_of(group, request).engine_id.rank == 3
    assert request.attempt == 1


def test_a_new_token_between_two_deaths_acquits_the_sequence() -> None:
    group = Group(4)
    request = make_add(1)
    group.dispatcher.route(request)
    for position in range(3):
        assert group.close(connection_of(group, request)) == []
        group.hear(connection_of(group, request), make_tokens(request, position, 5))
    assert group.sender.added[-1][1].output_token_ids == [5, 5]
    assert len(group.dispatcher.in_flight) == 1


def test_a_token_before_a_gap_acquits_it_too() -> None:
    group = Group(4)
    request = make_add(1)
    group.dispatcher.route(request)
    group.close(connection_of(group, request))
    group.hear(connection_of(group, request), make_tokens(request, 0, 5))
    group.hear(connection_of(group, request), is_gap=True, applied=1)
    assert group.close(connection_of(group, request)) == []
    assert len(group.dispatcher.in_flight) == 1


def test_planned_moves_gaps_and_restarts_are_no_crashes() -> None:
    group = Group(5)
    request = make_add(1)
    group.dispatcher.route(request)
    group.close(connection_of(group, request))
    group.close(connection_of(group, request), MigrationReason.PLANNED)
    group.hear(connection_of(group, request), is_gap=True, applied=1)
    group.dispatcher.migrate_from(connection_of(group, request), "it is drained")
    assert group.settle() == []
    connection = connection_of(group, request)
    group.close(connection, MigrationReason.RESTART)
    assert connection_of(group, request).engine_id != connection.engine_id
    assert request.attempt == 5


def test_an_aborted_sequence_is_not_moved_but_ends() -> None:
    group = Group(2)
    request = make_add(1)
    group.dispatcher.route(request)
    group.dispatcher.abort(1)
    (end,) = group.close(connection_of(group, request))
    assert end.finish_reason is FinishReason.ABORT


def test_with_no_engine_left_a_sequence_waits_for_one() -> None:
    group = Group(1)
    request = make_add(1)
    group.dispatcher.route(request)
    assert group.close(group.connections[EngineId(0, 1)]) == []
    assert (group.dispatcher.num_waiting, len(group.dispatcher.in_flight)) == (1, 1)
    reborn = group.open(0, incarnation=2)
    assert group.settle() == []
    assert connection_of(group, request) is reborn
    assert group.dispatcher.num_waiting == 0


def test_one_that_waits_in_vain_ends_with_an_error_that_says_why_and_for_how_long() -> None:
    group = Group(1, MigrationConfig(timeout_s=120))
    group.dispatcher.route(make_add(1))
    group.close(group.connections[EngineId(0, 1)])
    group.dispatcher.on_time(1000.0)
    group.dispatcher.on_time(1119.9)
    assert group.settle() == []
    group.dispatcher.on_time(1120.0)
    (end,) = group.settle()
    assert end.finish_reason is FinishReason.ERROR
    assert (end.error or "").startswith("gone; no other engine took it for 120 s (--move-timeout)")
    assert (group.dispatcher.num_waiting, len(group.dispatcher.in_flight)) == (0, 0)


def test_an_abort_ends_one_that_waits_at_once() -> None:
    group = Group(1)
    group.dispatcher.route(make_add(1))
    group.close(group.connections[EngineId(0, 1)])
    group.dispatcher.abort(1)
    (end,) = group.settle()
    assert end.finish_reason is FinishReason.ABORT
    assert group.dispatcher.num_waiting == 0


def test_a_pinned_sequence_survives_on_another_rank_while_new_ones_are_refused() -> None:
    group = Group(2)
    request = make_add(1)
    group.dispatcher.route(request, 0)
    group.close(group.connections[EngineId(0, 1)])
    assert connection_of(group, request).engine_id == EngineId(1, 1)


def test_a_planned_move_frees_an_engine_that_lives_on() -> None:
    group = Group(2)
    request = make_add(1)
    connection = group.dispatcher.route(request)
    group.hear(connection, make_tokens(request, 0, 5))
    connection.leaving = True
    group.dispatcher.refresh()
    group.dispatcher.migrate_from(connection, "it is drained")
    assert group.settle() == []
    assert group.sender.aborted == [(1, 0, 0)]
    assert connection_of(group, request).engine_id != connection.engine_id
    assert connection.ledger.num_unfinished == 0


def test_an_end_of_an_attempt_that_no_engine_was_sent_ends_it_and_nothing_else() -> None:
    group = Group(1)
    request, other = make_add(1), make_add(2)
    connection = group.dispatcher.route(request)
    group.dispatcher.route(other)
    group.close(connection)
    assert (group.dispatcher.num_waiting, request.attempt) == (2, 1)
    odd = [make_end(request, FinishReason.REROUTE), make_end(request)]
    assert [output.finish_reason for output in group.hear(connection, *odd)] == [FinishReason.LENGTH]
    assert (group.dispatcher.num_waiting, len(group.dispatcher.in_flight)) == (1, 1)


def test_a_token_that_cannot_be_ends_its_sequence_alone() -> None:
    group = Group(1)
    request, other = make_add(1), make_add(2)
    connection = group.dispatcher.route(request)
    group.dispatcher.route(other)
    token, end = group.hear(connection, make_tokens(request, 0, 5, 1 << 40), make_tokens(other, 0, 6))
    assert (token.request_id, end.request_id) == (2, 1)
    assert end.finish_reason is FinishReason.ERROR
    assert group.sender.aborted == [(1, 0, 0)]
