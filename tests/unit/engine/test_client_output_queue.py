"""Outputs that wait for a client: one frame at a time, merged per sequence when it takes none."""

from engine.proc.client_output_queue import MAX_OUTPUTS_PER_FRAME, ClientOutputQueue
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineCoreOutput, EngineCoreOutputs, ErrorKind, FinishReason, UtilityOutput
from engine.wire.tensors import Tensor

ENGINE = EngineId(0, 1)
CLIENT = ClientId(0, 1)


def output(
    request_id: int, position: int, tokens: list[int], finish: FinishReason | None = None, attempt: int = 0
) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, 0, attempt, position, tokens, finish)


def make_queue() -> ClientOutputQueue:
    return ClientOutputQueue(ENGINE, CLIENT)


def take(output_queue: ClientOutputQueue, applied: int = 0) -> EngineCoreOutputs:
    frame = output_queue.take(applied)
    assert frame is not None
    return frame


def take_all(output_queue: ClientOutputQueue) -> list[EngineCoreOutputs]:
    frames = []
    while (frame := output_queue.take(0)) is not None:
        frames.append(frame)
    assert not output_queue.has_frame
    return frames


def test_an_empty_queue_has_no_frame() -> None:
    output_queue = make_queue()
    assert not output_queue.has_frame
    assert output_queue.take(0) is None


def test_a_frame_carries_the_step_and_its_numbers() -> None:
    output_queue = make_queue()
    output_queue.add([output(1, 0, [5])], report_seq=9)
    frame = take(output_queue, applied=3)
    assert (frame.engine_id, frame.client_id) == (ENGINE, CLIENT)
    assert (frame.out_seq, frame.applied, frame.report_seq) == (1, 3, 9)
    assert frame.outputs[0].new_token_ids == [5]
    assert not output_queue.has_frame


def test_frames_are_numbered_without_holes() -> None:
    output_queue = make_queue()
    numbers = []
    for _ in range(3):
        output_queue.add([output(1, 0, [5])], report_seq=1)
        numbers.append(take(output_queue).out_seq)
    assert numbers == [1, 2, 3]


def test_a_refused_frame_keeps_its_number_and_merges_with_later_steps() -> None:
    output_queue = make_queue()
    output_queue.add([output(1, 0, [5]), output(2, 0, [6])], report_seq=1)
    output_queue.put_back(take(output_queue))
    output_queue.add([output(1, 1, [7], FinishReason.LENGTH)], report_seq=2)
    output_queue.add([output(3, 0, [8])], report_seq=3)
    assert len(output_queue) == 3
    frame = take(output_queue)
    assert (frame.out_seq, frame.report_seq) == (1, 3)
    assert [(o.request_id, o.first_position, o.new_token_ids) for o in frame.outputs] == [
        (1, 0, [5, 7]),
        (2, 0, [6]),
        (3, 0, [8]),
    ]
    assert frame.outputs[0].finish_reason is FinishReason.LENGTH


def test_a_refused_frame_goes_in_front_of_what_came_while_it_was_under_way() -> None:
    output_queue = make_queue()
    output_queue.add([output(1, 0, [5]), output(2, 0, [6])], report_seq=1)
    frame = take(output_queue)
    output_queue.add([output(3, 0, [8]), output(1, 1, [7])], report_seq=2)
    output_queue.put_back(frame)
    frame = take(output_queue)
    assert (frame.out_seq, frame.report_seq) == (1, 2)
    assert [(o.request_id, o.new_token_ids) for o in frame.outputs] == [(1, [5, 7]), (2, [6]), (3, [8])]


def test_a_frame_that_is_refused_again_and_again_loses_nothing() -> None:
    output_queue = make_queue()
    for position in range(5):
        output_queue.add([output(1, position, [position])], report_seq=position)
        frame = take(output_queue)
        output_queue.add_utility(UtilityOutput(position), report_seq=position)
        output_queue.put_back(frame)
    frames = take_all(output_queue)
    assert [o.new_token_ids for frame in frames for o in frame.outputs] == [[0, 1, 2, 3, 4]]
    assert [frame.utility_output.call_id for frame in frames if frame.utility_output is not None] == [0, 1, 2, 3, 4]
    assert [frame.out_seq for frame in frames] == [1, 2, 3, 4, 5]


def test_refused_last_words_and_heartbeats_are_sent_later() -> None:
    output_queue = make_queue()
    empty = output_queue.take(0, even_if_empty=True)
    assert empty is not None
    assert not output_queue.has_frame
    output_queue.put_back(empty)
    assert take(output_queue).out_seq == 1
    output_queue.add_last_words("device lost")
    output_queue.put_back(take(output_queue))
    assert [(frame.out_seq, frame.dead) for frame in take_all(output_queue)] == [(2, "device lost")]


def test_a_client_that_takes_nothing_costs_one_entry_per_sequence() -> None:
    output_queue = make_queue()
    for position in range(1000):
        output_queue.add([output(1, position, [5]), output(2, position, [6])], report_seq=position)
    assert len(output_queue) == 2
    assert [len(o.new_token_ids) for o in take(output_queue).outputs] == [1000, 1000]


def join(*steps: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
    output_queue = make_queue()
    for step in steps:
        output_queue.add(step, report_seq=1)
    return take(output_queue).outputs


def test_merging_keeps_the_first_facts_and_the_end() -> None:
    first = EngineCoreOutput(1, 0, 0, 0, [5], queue_time_s=0.5, num_cached_tokens=16)
    last = EngineCoreOutput(1, 0, 0, 1, [], FinishReason.STOP, stop_token_id=2)
    (merged,) = join([first], [last])
    assert (merged.queue_time_s, merged.num_cached_tokens) == (0.5, 16)
    assert (merged.new_token_ids, merged.finish_reason, merged.stop_token_id) == ([5], FinishReason.STOP, 2)


def test_merging_keeps_whose_fault_an_end_is() -> None:
    last = EngineCoreOutput(1, 0, 0, 1, [], FinishReason.ERROR, error="odd", error_kind=ErrorKind.REQUEST)
    for merged in (join([output(1, 0, [5])], [last]), join([output(2, 0, [5])], [last])[1:]):
        assert [(o.error, o.error_kind) for o in merged] == [("odd", ErrorKind.REQUEST)]


def test_attempts_are_never_merged() -> None:
    merged = join([output(1, 0, [5], FinishReason.ABORT)], [output(1, 0, [6], attempt=1)])
    assert [(o.attempt, o.new_token_ids) for o in merged] == [(0, [5]), (1, [6])]


def test_what_a_step_gave_is_not_changed_by_merging() -> None:
    step = [output(1, 0, [5])]
    join(step, [output(1, 1, [6])])
    assert step[0].new_token_ids == [5]


def test_a_vector_stays_with_its_sequence() -> None:
    pooled = Tensor("float32", (1,), b"abcd")
    ended = EngineCoreOutput(1, 0, 0, 0, [], FinishReason.STOP, pooled=pooled)
    assert [o.pooled for o in join([output(2, 0, [5])], [ended], [output(2, 1, [6])])] == [None, pooled]


def test_what_waited_long_goes_out_in_several_frames() -> None:
    output_queue = make_queue()
    many = MAX_OUTPUTS_PER_FRAME + 5
    for step in range(2):
        output_queue.add([output(i, step, [step]) for i in range(many)], report_seq=step)
    output_queue.add_last_words("device lost")
    frames = take_all(output_queue)
    assert [len(frame.outputs) for frame in frames] == [MAX_OUTPUTS_PER_FRAME, 5, 0]
    assert [o.request_id for frame in frames for o in frame.outputs] == list(range(many))
    assert [frame.dead for frame in frames] == [None, None, "device lost"]


def test_utility_answers_travel_one_to_a_frame_and_in_order() -> None:
    output_queue = make_queue()
    output_queue.add([output(1, 0, [5])], report_seq=1)
    output_queue.add_utility(UtilityOutput(1, "a"), report_seq=1)
    output_queue.add_utility(UtilityOutput(2, "b"), report_seq=1)
    frames = take_all(output_queue)
    assert [f.utility_output.call_id for f in frames if f.utility_output is not None] == [1, 2]
    assert [len(f.outputs) for f in frames] == [1, 0]


def test_last_words_come_behind_everything_else() -> None:
    output_queue = make_queue()
    output_queue.add_last_words("device lost")
    output_queue.add([output(1, 0, [5])], report_seq=1)
    assert [frame.dead for frame in take_all(output_queue)] == [None, "device lost"]


def test_a_cleared_queue_shows_the_client_a_gap() -> None:
    output_queue = make_queue()
    output_queue.add([output(1, 0, [5])], report_seq=1)
    output_queue.clear()
    frame = take(output_queue)
    assert (frame.out_seq, frame.outputs) == (2, [])
    assert not output_queue.has_frame
