"""Numbers of a line, its unapplied tail, and when it is sent again."""

import pytest

from client.engine_connection import RESEND_AFTER_S, EngineConnection
from engine.wire.codec import channel_decoder
from engine.wire.messages import AddRequest, UtilityRequest
from engine.wire.tensors import Frames, Tensor
from tests.unit.client.builders import CLIENT, make_add, make_connection


def _seqs(messages: list[Frames]) -> list[int]:
    return [channel_decoder().decode_frames(frames).channel_seq for frames in messages]


def _staged(count: int) -> EngineConnection:
    connection = make_connection()
    for request_id in range(1, count + 1):
        connection.stage(make_add(request_id))
    return connection


def test_messages_are_numbered_from_one() -> None:
    connection = make_connection()
    assert _seqs([connection.stage(make_add(i)) for i in range(3)]) == [1, 2, 3]


def test_a_message_that_was_taken_back_leaves_no_gap() -> None:
    connection = _staged(1)
    connection.stage(make_add(2))
    connection.unstage()
    assert _seqs([connection.stage(make_add(3))]) == [2]
    assert connection.num_unapplied == 2


def test_a_message_that_cannot_be_encoded_uses_up_no_number() -> None:
    connection = _staged(1)
    with pytest.raises(TypeError):
        connection.stage(UtilityRequest(CLIENT, 0, 1, "method", [object()]))
    assert (connection.num_unapplied, connection.next_seq) == (1, 2)


def test_what_is_applied_leaves_the_tail() -> None:
    connection = _staged(4)
    connection.on_applied(3)
    connection.on_applied(2)
    assert (connection.applied, connection.num_unapplied) == (3, 1)


def test_a_number_that_was_never_sent_is_not_believed() -> None:
    connection = _staged(2)
    connection.on_applied(57)
    assert (connection.applied, connection.num_unapplied) == (0, 2)


def test_the_tail_is_sent_again_in_order_when_nothing_moved_for_a_second() -> None:
    connection = _staged(3)
    connection.on_applied(1)
    assert connection.messages_to_resend(10.0) == []  # it moved a moment ago
    assert connection.messages_to_resend(10.0 + RESEND_AFTER_S / 2) == []
    assert _seqs(connection.messages_to_resend(10.0 + RESEND_AFTER_S)) == [2, 3]
    assert connection.messages_to_resend(10.1 + RESEND_AFTER_S) == []
    assert _seqs(connection.messages_to_resend(10.0 + 2 * RESEND_AFTER_S)) == [2, 3]


def test_a_line_that_was_idle_waits_a_second_from_its_next_message() -> None:
    connection = make_connection()
    assert connection.messages_to_resend(100.0) == []
    connection.stage(make_add(1))
    assert connection.messages_to_resend(100.0 + RESEND_AFTER_S / 2) == []
    assert _seqs(connection.messages_to_resend(100.0 + RESEND_AFTER_S)) == [1]


def test_a_line_that_moves_is_never_sent_again() -> None:
    connection = _staged(50)
    for tick in range(40):
        connection.on_applied(tick + 1)
        assert connection.messages_to_resend(float(tick)) == []


def test_missing_output_frames_are_counted_and_old_ones_are_not() -> None:
    connection = make_connection()
    assert [connection.on_out_seq(seq) for seq in (1, 2, 5, 4, 6)] == [0, 0, 2, 0, 0]


def test_a_staged_frame_is_the_message() -> None:
    decoded = channel_decoder().decode_frames(make_connection().stage(make_add(5)))
    assert isinstance(decoded, AddRequest)
    assert decoded.request_id == 5


def test_a_message_with_a_tensor_is_sent_again_whole() -> None:
    connection = make_connection()
    add = make_add(1)
    add.prompt_embeds = Tensor("float32", (1, 2), b"embedded")
    connection.stage(add)
    assert connection.messages_to_resend(0.0) == []
    (frames,) = connection.messages_to_resend(10 * RESEND_AFTER_S)
    assert frames[1] is add.prompt_embeds.data, "the tail copies no tensor"
    decoded = channel_decoder().decode_frames(frames)
    assert isinstance(decoded, AddRequest)
    assert decoded.prompt_embeds == add.prompt_embeds
