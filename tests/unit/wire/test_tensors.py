"""Tensors travel as frames of their own, share their memory, and no frames whatever get past a decoder or out of it."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.codec import FrameEncoder, channel_decoder, encode, output_decoder
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import AddRequest, EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine.wire.sampling import SamplingParams
from engine.wire.tensors import Buffer, Tensor
from tests.unit.wire.strategies import tensors

VECTOR = Tensor("float32", (2, 1), b"12345678")
OTHER = Tensor("bfloat16", (3,), b"abcdef")


def add(embeds: Tensor | None = VECTOR) -> AddRequest:
    return AddRequest(ClientId(0, 1), 1, 7, 0, 0, [0, 0], [], SamplingParams(4), prompt_embeds=embeds)


def outputs(*pooled: Tensor | None) -> EngineCoreOutputs:
    ended = [EngineCoreOutput(i, 0, 0, 0, [], FinishReason.STOP, pooled=one) for i, one in enumerate(pooled)]
    return EngineCoreOutputs(EngineId(0, 1), ClientId(0, 1), 1, 1, 1, ended)


def is_refused(frames: list[Buffer]) -> bool:
    try:
        output_decoder().decode_frames(frames)
    except MalformedMessageError:
        return True
    return False


def test_a_message_without_tensors_is_one_frame_and_the_same_bytes() -> None:
    assert FrameEncoder().encode(add(None)) == [encode(add(None))]


def test_each_tensor_is_a_frame_in_the_order_of_the_message() -> None:
    frames = FrameEncoder().encode(outputs(VECTOR, None, OTHER, VECTOR))
    assert frames[1:] == [b"12345678", b"abcdef", b"12345678"]
    assert output_decoder().decode_frames(frames) == outputs(VECTOR, None, OTHER, VECTOR)


def test_neither_end_copies_the_numbers() -> None:
    frames = FrameEncoder().encode(add())
    assert frames[1] is VECTOR.data
    received = bytearray(frames[1])
    message = channel_decoder().decode_frames([frames[0], memoryview(received)])
    assert isinstance(message, AddRequest)
    assert message.prompt_embeds == VECTOR
    received[0] = 0
    assert message.prompt_embeds != VECTOR


def test_an_encoder_forgets_the_tensors_of_a_message_that_failed() -> None:
    encoder = FrameEncoder()
    broken: Any = outputs(VECTOR)
    broken.dead = object()
    with pytest.raises(TypeError, match="object"):
        encoder.encode(broken)
    assert len(encoder.encode(outputs(OTHER))) == 2


def test_a_message_meant_to_have_one_frame_carries_no_tensor() -> None:
    with pytest.raises(TypeError):
        encode(add())
    with pytest.raises(MalformedMessageError):
        channel_decoder().decode(FrameEncoder().encode(add())[0])


@given(st.lists(st.none() | tensors(), max_size=4))
def test_any_tensors_come_back_equal(drawn: list[Tensor | None]) -> None:
    message = outputs(*drawn)
    assert output_decoder().decode_frames(FrameEncoder().encode(message)) == message


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda frames: frames[:-1], id="a frame is missing"),
        pytest.param(lambda frames: [*frames, b""], id="a frame too many"),
        pytest.param(lambda frames: frames[:1], id="the message alone"),
        pytest.param(lambda frames: frames[1:], id="the tensors alone"),
        pytest.param(lambda frames: [], id="nothing"),
        pytest.param(lambda frames: [frames[0], frames[2], frames[1]], id="in another order"),
        pytest.param(lambda frames: [frames[0], frames[1][:-1], frames[2]], id="a byte short"),
        pytest.param(lambda frames: [frames[0], bytes(frames[1]) + b"x", frames[2]], id="a byte long"),
    ],
)
def test_frames_that_do_not_belong_together_are_refused(change: Any) -> None:
    frames = FrameEncoder().encode(outputs(VECTOR, OTHER))
    assert is_refused(change(frames))


@pytest.mark.parametrize(
    "header",
    [
        None,  # the only one that is a message: no tensor, but then a frame too many
        7,
        "float32",
        [],
        [1],
        [1, "float32"],
        [1, "float32", 2],
        [1, "float32", [2], 0],
        ["1", "float32", [2]],
        [0, "float32", [2]],
        [2, "float32", [2]],
        [-1, "float32", [2]],
        [2**63, "float32", [2]],
        [1, "float33", [2]],
        [1, b"float32", [2]],
        [1, "object", [1]],
        [1, "float32", [-2]],
        [1, "float32", [-1, -2]],
        [1, "float32", [2.0]],
        [1, "float32", [True, 2]],
        [1, "float32", [2, "1"]],
        [1, "float32", [3]],
        [1, "float32", [2**62, 2**62, 2**62]],
        [1, "float32", [2] + [1] * 8],
        {"frame": 1},
    ],
)
def test_hostile_headers_are_refused(header: Any) -> None:
    message: Any = outputs(None)
    message.outputs[0].pooled = header
    assert is_refused([encode(message), b"12345678"])
    assert header is None or is_refused([encode(message)])


def test_two_tensors_cannot_share_a_frame() -> None:
    message: Any = outputs(None, None)
    for output in message.outputs:
        output.pooled = [1, "float32", [2]]
    assert is_refused([encode(message), b"12345678"])
    assert is_refused([encode(message), b"12345678", b"12345678"])


def test_a_refused_message_leaves_nothing_behind_in_the_decoder() -> None:
    decoder = output_decoder()
    good = FrameEncoder().encode(outputs(VECTOR, OTHER))
    for bad in (good[:2], [*good, b""], good[:1], [b"\xc1", b"x"]):
        with pytest.raises(MalformedMessageError):
            decoder.decode_frames(bad)
        assert decoder.decode_frames(good) == outputs(VECTOR, OTHER)


def test_random_frames_are_decoded_or_refused() -> None:
    rng = random.Random(5)
    good = FrameEncoder().encode(outputs(VECTOR, OTHER))
    num_refused = 0
    for _ in range(3_000):
        frames = [bytearray(frame) for frame in good]
        for _ in range(rng.randint(1, 3)):
            victim = rng.choice(frames)
            if victim and rng.random() < 0.8:
                victim[rng.randrange(len(victim))] = rng.randrange(256)
            else:
                del victim[rng.randrange(len(victim) + 1) :]
        num_refused += is_refused([bytes(frame) for frame in frames])
    assert 0 < num_refused < 3_000


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [("int7", (1,), b"x"), ("uint8", (2,), b"x"), ("float32", (-1,), b""), ("uint8", (1,) * 9, b"x")],
)
def test_a_tensor_that_is_none_cannot_be_made(dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(ValueError, match="a tensor of"):
        Tensor(dtype, shape, data)


def test_tensors_are_compared_by_what_they_hold() -> None:
    assert Tensor("uint8", (1, 2), b"ab") == Tensor("uint8", [1, 2], memoryview(b"ab"))
    for other in (
        Tensor("uint8", (2, 1), b"ab"),
        Tensor("uint8", (1, 2), b"aa"),
        Tensor("float16", (1,), b"ab"),
        b"ab",
    ):
        assert Tensor("uint8", (1, 2), b"ab") != other
