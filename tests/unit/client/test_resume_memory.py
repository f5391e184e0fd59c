"""What it costs to be able to move sequences, and who is given up when that is too much."""

from client.migration import CHECK_EVERY_S, PROMPT_TOKEN_BYTES, MigrationConfig
from engine.wire.ids import EngineId
from engine.wire.messages import FinishReason
from engine.wire.tensors import Tensor
from tests.unit.client.builders import make_add, make_end, make_tokens
from tests.unit.client.group import Group


def group_of(limit_tokens: int, num_ranks: int = 2) -> Group:
    return Group(num_ranks, MigrationConfig(resume_memory_bytes=limit_tokens * PROMPT_TOKEN_BYTES))


def test_beyond_the_limit_the_largest_are_served_on_but_cannot_be_moved() -> None:
    group = group_of(limit_tokens=100)
    sizes = {1: 10, 2: 60, 3: 50, 4: 20}
    for request_id, size in sizes.items():
        group.dispatcher.route(make_add(request_id, num_prompt_tokens=size), 0)
    group.dispatcher.on_time(0.0)
    assert (group.dispatcher.num_unmigratable, group.counts["forgotten_sequences"]) == (1, 1)
    connection = group.connections[EngineId(0, 1)]
    large = make_add(2)
    assert group.hear(connection, make_tokens(large, 0, 5, 6)) == [make_tokens(large, 0, 5, 6)]
    assert group.hear(connection, make_tokens(large, 1, 6)) == []  # its tokens are still counted
    assert group.hear(connection, make_tokens(large, 2, 7)) == [make_tokens(large, 2, 7)]
    (end,) = group.close(connection)
    assert (end.request_id, end.finish_reason) == (2, FinishReason.ERROR)
    assert "--resume-memory" in (end.error or "")


def test_one_that_was_given_up_ends_like_any_other() -> None:
    group = group_of(limit_tokens=5)
    request = make_add(1, num_prompt_tokens=10)
    connection = group.dispatcher.route(request)
    group.dispatcher.on_time(0.0)
    assert group.hear(connection, make_end(request)) == [make_end(request)]
    assert group.dispatcher.num_unmigratable == 0


def test_outputs_count_and_so_do_prompts_of_embeddings() -> None:
    group = group_of(limit_tokens=30)
    talker, embedded = make_add(1), make_add(2)
    embedded.prompt_embeds = Tensor("float32", [1, 100], bytes(400))
    group.dispatcher.route(embedded, 1)
    connection = group.dispatcher.route(talker, 0)
    group.dispatcher.on_time(0.0)
    assert group.dispatcher.num_unmigratable == 0
    group.hear(connection, make_tokens(talker, 0, *range(250)))
    group.dispatcher.on_time(CHECK_EVERY_S)
    assert group.dispatcher.num_unmigratable == 1


def test_samples_share_their_prompt_and_it_counts_once() -> None:
    group = group_of(limit_tokens=150)
    prompt = [1] * 100
    for sample_index in range(8):
        request = make_add(1, sample_index)
        request.prompt_token_ids = prompt
        group.dispatcher.route(request)
    group.dispatcher.on_time(0.0)
    assert group.dispatcher.num_unmigratable == 0


def test_one_that_waits_to_be_moved_and_is_given_up_ends() -> None:
    group = group_of(limit_tokens=5, num_ranks=1)
    group.dispatcher.route(make_add(1, num_prompt_tokens=10))
    assert group.close(group.connections[EngineId(0, 1)]) == []
    group.dispatcher.on_time(0.0)
    (end,) = group.settle()
    assert "--resume-memory" in (end.error or "")
    assert len(group.dispatcher.in_flight) == 0


def test_samples_that_share_a_prompt_are_given_up_together() -> None:
    group = group_of(limit_tokens=150)
    prompt = [1] * 200
    for sample_index in range(3):
        request = make_add(1, sample_index)
        request.prompt_token_ids = prompt
        group.dispatcher.route(request)
    group.dispatcher.route(make_add(2, num_prompt_tokens=100))
    group.dispatcher.on_time(0.0)
    assert group.dispatcher.num_unmigratable == 3  # one kept would keep the prompt, and free nothing
