"""Requests that decode and yet make no sense: each ends alone, and no step of the core raises."""

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.config.engine_config import EngineConfig, EngineKind, ModelConfig, SchedulerConfig, SimConfig
from engine.interfaces.engine_core import EngineCore
from engine.loading import load_core
from engine.wire.codec import FrameEncoder, channel_decoder, encode
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import AbortRequest, AddRequest, EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine.wire.sampling import PoolingParams, SamplingParams
from engine.wire.tensors import Tensor
from tests.unit.runner.families import save_family
from tests.unit.wire.mutations import mutations

CLIENT = ClientId(0, 1)
MAX_STEPS = 20

EVERYTHING = SamplingParams(
    *(8, 0, 0.7, 0.9, 4, 0.1, 3),
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={3: 1.0},
    allowed_token_ids=(3, 4, 5, 6),
    bad_words=((3, 4),),
)
REQUEST = AddRequest(CLIENT, 1, 5, 0, 0, [1, 2, 3], [5], SamplingParams(16, stop_token_ids=(2,)))
REQUESTS = [REQUEST, replace(REQUEST, sampling=EVERYTHING)]


@pytest.fixture(scope="module")
def sim() -> EngineCore:
    return load_core(EngineConfig(kind=EngineKind.SIM, sim=SimConfig(step_s=0, prefill_s_per_token=0)), _ignore)


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    folder: Path = tmp_path_factory.mktemp("models") / "llama"
    save_family("llama", folder)
    model = ModelConfig(model=str(folder), dtype="float32", device="cpu")
    scheduler = SchedulerConfig(kv_cache_memory_bytes=4 * 1024 * 1024)
    core = load_core(EngineConfig(kind=EngineKind.TORCH, model=model, scheduler=scheduler), _ignore)
    yield core
    core.close()


def _ignore(_doing: str, _progress: float) -> None:
    pass


@pytest.mark.parametrize(("kind", "count"), [("sim", 20_000), ("torch", 1_000)])
def test_mutated_requests_end_alone(kind: str, count: int, request: pytest.FixtureRequest) -> None:
    core: EngineCore = request.getfixturevalue(kind)
    decoder, num_taken = channel_decoder(), 0
    frames = mutations([encode(message) for message in REQUESTS], seed=7)
    for number, frame in enumerate(itertools.islice(frames, count)):
        try:
            message = decoder.decode(frame)
        except MalformedMessageError:
            continue
        if isinstance(message, AddRequest):
            message.request_id = number
            core.add_request(message, 0.0)
        elif isinstance(message, AbortRequest):
            core.abort_requests([((message.request_id, message.sample_index), message.attempt)])
        num_taken += 1
        _run_to_the_end(core)
    assert num_taken > count // 20


@pytest.mark.parametrize(("kind", "count"), [("sim", 5_000), ("torch", 1_000)])
def test_mutated_requests_with_tensors_end_alone(kind: str, count: int, request: pytest.FixtureRequest) -> None:
    core: EngineCore = request.getfixturevalue(kind)
    size = core.limits.hidden_size
    embeds = Tensor("float32", (3, size), random.Random(5).randbytes(12 * size))
    asked = [
        replace(REQUEST, prompt_embeds=embeds),
        replace(REQUEST, prompt_embeds=embeds, pooling=PoolingParams(), output_token_ids=[]),
        replace(REQUEST, pooling=PoolingParams(), output_token_ids=[]),
    ]
    decoder, num_taken = channel_decoder(), 0
    for number, frame in enumerate(
        itertools.islice(mutations([bytes(FrameEncoder().encode(message)[0]) for message in asked], seed=7), count)
    ):
        for tensors in ([], [embeds.data]):
            with contextlib.suppress(MalformedMessageError):
                message = decoder.decode_frames([frame, *tensors])
                if isinstance(message, AddRequest):
                    message.request_id = number
                    core.add_request(message, 0.0)
                    _run_to_the_end(core)
                    num_taken += 1
    assert num_taken > count // 20


def test_a_sample_without_randomness_of_its_own_is_refused(torch: EngineCore) -> None:
    for index in (-1, 2**32):
        torch.add_request(replace(REQUEST, sample_index=index), 0.0)
        (end,) = _run_to_the_end(torch)
        assert end.finish_reason is FinishReason.ERROR
        assert "sample_index" in (end.error or "")


def _run_to_the_end(core: EngineCore) -> list[EngineCoreOutput]:
    ends: list[EngineCoreOutput] = []
    for step in range(MAX_STEPS + 2):
        if step == MAX_STEPS:
            core.scheduler.give_back_all()
        if not core.has_work():
            break
        for outputs in core.step(0.0).values():
            FrameEncoder().encode(EngineCoreOutputs(EngineId(0, 1), CLIENT, 1, 1, 1, outputs))
            ends += [output for output in outputs if output.finish_reason is not None]
    assert not core.has_work()
    encode(core.load())
    return ends
