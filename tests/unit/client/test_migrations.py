"""In which order and how fast stranded sequences go to the engines that are left."""

from collections import Counter

from client.migration import MigrationConfig
from engine.wire.ids import EngineId
from tests.unit.client.builders import make_add, make_tokens
from tests.unit.client.group import Group


def test_moves_spread_over_all_ranks_by_their_tokens() -> None:
    group = Group(4)
    sizes = [4096] * 3 + [16] * 9
    requests = [make_add(i, num_prompt_tokens=size) for i, size in enumerate(sizes)]
    for request in requests:
        connection = group.dispatcher.route(request, 0)
        group.hear(connection, make_tokens(request, 0, 5))
    del group.sender.sent[:]
    group.close(group.connections[EngineId(0, 1)])
    tokens: Counter[int] = Counter()
    for engine_id, message in group.sender.added:
        tokens[engine_id.rank] += len(message.prompt_token_ids)
    assert sorted(tokens) == [1, 2, 3]
    assert max(tokens.values()) - min(tokens.values()) <= 16 * 9


def test_an_engine_computes_so_many_moved_tokens_anew_at_once_and_the_rest_waits() -> None:
    group = Group(2, MigrationConfig(tokens_in_flight=250))
    requests = [make_add(i, num_prompt_tokens=99) for i in range(5)]
    for request in requests:
        connection = group.dispatcher.route(request, 0)
        group.hear(connection, make_tokens(request, 0, 5))
    group.close(connection)
    assert group.dispatcher.num_waiting == 3
    survivor = group.connections[EngineId(1, 1)]
    for index, num_waiting in enumerate((2, 1, 0, 0, 0)):
        group.hear(survivor, make_tokens(requests[index], 1, 6))
        assert group.dispatcher.num_waiting == num_waiting
    assert [message.request_id for _, message in group.sender.added[5:]] == [0, 1, 2, 3, 4]


def test_one_sequence_beyond_the_limit_goes_alone() -> None:
    group = Group(2, MigrationConfig(tokens_in_flight=10))
    requests = [make_add(i, num_prompt_tokens=99) for i in range(2)]
    for request in requests:
        connection = group.dispatcher.route(request, 0)
        group.hear(connection, make_tokens(request, 0, 5))
    group.close(connection)
    assert group.dispatcher.num_waiting == 1
    group.hear(group.connections[EngineId(1, 1)], make_tokens(requests[0], 1, 6))
    assert group.dispatcher.num_waiting == 0


def test_no_engine_gets_two_sequences_at_once_that_may_have_killed_theirs() -> None:
    group = Group(3)
    running = make_add(9)
    requests = [make_add(i) for i in range(4)]
    connection = group.dispatcher.route(running, 0)
    for request in requests:
        group.dispatcher.route(request, 0)
    group.hear(connection, make_tokens(running, 0, 5))
    del group.sender.sent[:]
    group.close(connection)
    assert [message.request_id for _, message in group.sender.added] == [9, 0, 1]  # those that had tokens go first
    assert {engine_id.rank for engine_id, message in group.sender.added[1:]} == {1, 2}
    victim = group.sender.added[1][0]
    group.hear(group.connections[group.sender.added[2][0]], make_tokens(requests[1], 0, 5))
    assert [message.request_id for _, message in group.sender.added] == [9, 0, 1, 2]
    (end,) = group.close(group.connections[victim])  # the poison; nobody but it was tried there
    assert end.request_id == 0
    assert group.dispatcher.num_waiting == 0  # it was found, so the others are tried as if nothing had been
