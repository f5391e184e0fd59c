"""What is encoded comes back equal, and no bytes whatever get past a decoder or out of it."""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire import codec
from engine.wire.codec import Decoder, FrameEncoder, encode
from engine.wire.control import Membership
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import (
    AbortRequest,
    AddRequest,
    ClientInfo,
    ClientReport,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    EngineReport,
    FinishReason,
    GroupState,
    LoadSnapshot,
    SupervisorReport,
    UtilityOutput,
    UtilityRequest,
)
from engine.wire.replicas import ReplicaInfo
from engine.wire.sampling import SamplingParams
from engine.wire.states import EnginePhase, ReplicaState
from tests.unit.wire.mutations import mutations
from tests.unit.wire.strategies import MESSAGES, messages

ENGINE, CLIENT = EngineId(1, 2), ClientId(0, 3)
REPORT = EngineReport(ENGINE, 7, 1, 1, 1, 0, EnginePhase.RUNNING, 0, True, {CLIENT: 4}, Load(1, 2, 3, 400, 0.5))

EXAMPLES: dict[Callable[[], Decoder[Any]], list[Any]] = {
    codec.channel_decoder: [
        AddRequest(CLIENT, 1, 2**50, 0, 0, [1, 300, 70_000], [5], SamplingParams(16, stop_token_ids=(2,))),
        AbortRequest(CLIENT, 2, 2**50, 0, 0),
        UtilityRequest(CLIENT, 3, 1, "profile", [{"a": [1, 2.5, None]}, True]),
    ],
    codec.ready_decoder: [EngineReady(ENGINE, "0.1+abc", "cafe", 4096, 49_152, 65_536, 64, "cpu", "bf16", "n", 17)],
    codec.output_decoder: [
        EngineCoreOutputs(
            ENGINE,
            CLIENT,
            9,
            3,
            8,
            [EngineCoreOutput(2**50, 0, 0, 4, [12, 13], FinishReason.STOP, 2, None, 0.25)],
            UtilityOutput(1, {"x": [1, {"y": "z"}]}),
            "out of memory",
        )
    ],
    codec.report_decoder: [
        REPORT,
        ClientReport(1, ClientInfo(CLIENT, "ipc:///r", "ipc:///o")),
        SupervisorReport(1, [ReplicaInfo(ENGINE, ReplicaState.DEAD, "signal 9")], [ENGINE], [CLIENT]),
    ],
    codec.state_decoder: [
        GroupState(1, 2, Membership(1, [ENGINE]), None, False, [], 0, [], [ReplicaInfo(ENGINE, ReplicaState.ALIVE)]),
        LoadSnapshot(1, 3, [REPORT]),
    ],
}

DECODERS = [pytest.param(make, id=make.__name__) for make in EXAMPLES]
NUM_MUTATIONS = 100_000 // len(EXAMPLES)


def is_survived(decoder: Decoder[Any], frame: bytes) -> bool:
    """Tell whether the frame is a message; whatever it is, nothing but MalformedMessageError may come out."""
    try:
        message = decoder.decode(frame)
    except MalformedMessageError:
        return False
    encode(message)
    return True


@pytest.mark.parametrize("make", DECODERS)
def test_each_message_of_a_channel_comes_back_equal(make: Callable[[], Decoder[Any]]) -> None:
    decoder = make()
    for message in EXAMPLES[make]:
        assert decoder.decode(encode(message)) == message


@pytest.mark.parametrize("message_type", MESSAGES)
@given(data=st.data())
@settings(max_examples=50)
def test_every_value_of_every_message_comes_back_equal(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(messages(message_type))
    assert Decoder[Any](message_type).decode_frames(FrameEncoder().encode(message)) == message


def test_every_message_type_has_an_example() -> None:
    assert {type(message) for examples in EXAMPLES.values() for message in examples} == set(MESSAGES)


@pytest.mark.parametrize("make", DECODERS)
def test_mutated_messages_are_decoded_or_refused(make: Callable[[], Decoder[Any]]) -> None:
    decoder = make()
    frames = itertools.islice(mutations([encode(message) for message in EXAMPLES[make]], seed=2), NUM_MUTATIONS)
    accepted = sum(is_survived(decoder, frame) for frame in frames)
    assert 0 < accepted < NUM_MUTATIONS  # the mutations are neither all broken nor all harmless


@pytest.mark.parametrize("make", DECODERS)
@given(frame=st.binary(max_size=200))
def test_random_bytes_are_decoded_or_refused(make: Callable[[], Decoder[Any]], frame: bytes) -> None:
    is_survived(make(), frame)


@pytest.mark.parametrize("make", DECODERS)
@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x01", id="one integer"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array of 4 billion"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of 4 billion"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
        pytest.param(b"\x91" * 100_000, id="nested 100,000 deep"),
        pytest.param(b"\x92\xc1\xc1", id="a code that msgpack never uses"),
    ],
)
def test_hostile_bytes_are_refused(make: Callable[[], Decoder[Any]], frame: bytes) -> None:
    assert not is_survived(make(), frame)


def test_hostile_values_of_untyped_arguments_are_refused_too() -> None:
    for value in (b"\x81\x81\x01\x02\x03", b"\xd7\xff" + b"\xff" * 8, b"\xa1\xff", b"\x91" * 5_000 + b"\x01"):
        assert not is_survived(codec.channel_decoder(), b"\x96\x03\x92\x00\x01\x01\x01\xa1x\x91" + value)


def test_ids_that_fit_no_routing_id_are_refused() -> None:
    for number in (-1, 2**32):
        report = msgspec.structs.replace(REPORT, engine_id=EngineId(number, 1))
        assert not is_survived(codec.report_decoder(), encode(report))


def test_a_message_of_another_channel_is_refused() -> None:
    assert not is_survived(codec.report_decoder(), encode(EXAMPLES[codec.channel_decoder][0]))


def test_an_older_message_without_the_appended_fields_gets_their_defaults() -> None:
    class Older(msgspec.Struct, array_like=True):
        call_id: int

    class Newer(msgspec.Struct, array_like=True):
        call_id: int
        error: str | None = None

    assert Decoder[Newer](Newer).decode(encode(Older(3))) == Newer(3)
    assert Decoder[Older](Older).decode(encode(Newer(3, "x"))) == Older(3)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("encoder", [encode, FrameEncoder().encode])
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800", object(), _nested(5_000)], ids=lambda v: str(type(v)))
def test_what_cannot_travel_is_one_kind_of_error(encoder: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(TypeError):
        encoder(UtilityRequest(CLIENT, 3, 1, "echo", [value]))
    encoder(UtilityRequest(CLIENT, 3, 1, "echo", [1]))
