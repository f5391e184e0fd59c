"""Numbers of a line, its unapplied tail, and when it is sent again."""

import pytest

from client.engine_line import RESEND_AFTER_S, EngineLine
from engine.wire.codec import line_decoder
from engine.wire.messages import AddRequest, UtilityRequest
from engine.wire.sockets import Frames
from engine.wire.tensors import Tensor
from tests.unit.client.builders import CLIENT, make_add, make_line


def _seqs(messages: list[Frames]) -> list[int]:
    return [line_decoder().decode_frames(frames).line_seq for frames in messages]


def _staged(count: int) -> EngineLine:
    line = make_line()
    for request_id in range(1, count + 1):
        line.stage(make_add(request_id))
    return line


def test_messages_are_numbered_from_one() -> None:
    line = make_line()
    assert _seqs([line.stage(make_add(i)) for i in range(3)]) == [1, 2, 3]


def test_a_message_that_was_taken_back_leaves_no_gap() -> None:
    line = _staged(1)
    line.stage(make_add(2))
    line.unstage()
    assert _seqs([line.stage(make_add(3))]) == [2]
    assert line.num_unapplied == 2


def test_a_message_that_cannot_be_encoded_uses_up_no_number() -> None:
    line = _staged(1)
    with pytest.raises(TypeError):
        line.stage(UtilityRequest(CLIENT, 0, 1, "method", [object()]))
    assert (line.num_unapplied, line.next_seq) == (1, 2)


def test_what_is_applied_leaves_the_tail() -> None:
    line = _staged(4)
    line.on_applied(3)
    line.on_applied(2)
    assert (line.applied, line.num_unapplied) == (3, 1)


def test_a_number_that_was_never_sent_is_not_believed() -> None:
    line = _staged(2)
    line.on_applied(57)
    assert (line.applied, line.num_unapplied) == (0, 2)


def test_the_tail_is_sent_again_in_order_when_nothing_moved_for_a_second() -> None:
    line = _staged(3)
    line.on_applied(1)
    assert line.messages_to_resend(10.0) == []  # it moved a moment ago
    assert line.messages_to_resend(10.0 + RESEND_AFTER_S / 2) == []
    assert _seqs(line.messages_to_resend(10.0 + RESEND_AFTER_S)) == [2, 3]
    assert line.messages_to_resend(10.1 + RESEND_AFTER_S) == []
    assert _seqs(line.messages_to_resend(10.0 + 2 * RESEND_AFTER_S)) == [2, 3]


def test_a_line_that_was_idle_waits_a_second_from_its_next_message() -> None:
    line = make_line()
    assert line.messages_to_resend(100.0) == []
    line.stage(make_add(1))
    assert line.messages_to_resend(100.0 + RESEND_AFTER_S / 2) == []
    assert _seqs(line.messages_to_resend(100.0 + RESEND_AFTER_S)) == [1]


def test_a_line_that_moves_is_never_sent_again() -> None:
    line = _staged(50)
    for tick in range(40):
        line.on_applied(tick + 1)
        assert line.messages_to_resend(float(tick)) == []


def test_missing_output_frames_are_counted_and_old_ones_are_not() -> None:
    line = make_line()
    assert [line.on_out_seq(seq) for seq in (1, 2, 5, 4, 6)] == [0, 0, 2, 0, 0]


def test_a_staged_frame_is_the_message() -> None:
    decoded = line_decoder().decode_frames(make_line().stage(make_add(5)))
    assert isinstance(decoded, AddRequest)
    assert decoded.request_id == 5


def test_a_message_with_a_tensor_is_sent_again_whole() -> None:
    line = make_line()
    add = make_add(1)
    add.prompt_embeds = Tensor("float32", (1, 2), b"embedded")
    line.stage(add)
    assert line.messages_to_resend(0.0) == []
    (frames,) = line.messages_to_resend(10 * RESEND_AFTER_S)
    assert frames[1] is add.prompt_embeds.data, "the tail copies no tensor"
    decoded = line_decoder().decode_frames(frames)
    assert isinstance(decoded, AddRequest)
    assert decoded.prompt_embeds == add.prompt_embeds
