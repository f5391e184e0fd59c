"""One behaviour over every line: in this process, and over ZeroMQ with and without keys, awaited and not."""

import asyncio
import random
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.config.engine_config import EngineConfig, EngineKind, ModelConfig, SchedulerConfig
from engine.wire.errors import EngineDeadError, InvalidRequestError, UtilityError
from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, EngineCoreOutput, FinishReason
from engine.wire.sampling import PoolingParams, SamplingParams
from engine.wire.tensors import Tensor
from tests.contract.channels import Channel, Client, Deployments, open_client
from tests.contract.deployment import DEADLINE_S, Transport, finish, make_request, sim_engine

CRASH, FAIL = 1, 2
FOREVER = 5_000
SIM = sim_engine(step_s=0.001, crash_on_token=CRASH, fail_on_token=FAIL)
HIDDEN = SIM.sim.hidden_size
KV_BYTES = 4 * 1024 * 1024

every_channel = pytest.mark.parametrize("channel", Channel, ids=lambda channel: channel.value[0])


@pytest.fixture(scope="module")
def sims() -> Iterator[Deployments]:
    with ExitStack() as stack:
        yield Deployments(stack, 2, SIM, *Transport)


@pytest.fixture
def mortal_sims() -> Iterator[Deployments]:
    with ExitStack() as stack:
        yield Deployments(stack, 3, SIM)


def ends(outputs: list[EngineCoreOutput]) -> list[FinishReason]:
    return [output.finish_reason for output in outputs if output.finish_reason is not None]


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    """Return the tokens of one sequence, which must come without a hole or a repetition."""
    got: list[int] = []
    for output in outputs:
        assert output.first_position in (len(got), -1)
        got += output.new_token_ids
    return got


def requests_of(client: Client, count: int, **sampling: Any) -> list[AddRequest]:
    return [make_request(client, b"prompt %d" % index, seed=index, **sampling) for index in range(count)]


async def answers(client: Client, count: int, **sampling: Any) -> list[list[int]]:
    requests = requests_of(client, count, **sampling)
    for request in requests:
        await client.add_request_async(request)
    outputs = await finish(client, *requests)
    assert all(ends(outputs[request.request_id]) == [FinishReason.LENGTH] for request in requests)
    return [tokens(outputs[request.request_id]) for request in requests]


@every_channel
async def test_each_request_gets_the_same_tokens_in_order_and_one_end(channel: Channel, sims: Deployments) -> None:
    async with open_client(channel, sims) as client, open_client(Channel.INPROC, sims) as reference:
        assert await answers(client, 12, max_tokens=10) == await answers(reference, 12, max_tokens=10)
        assert client.statistics()["in_flight"] == 0


@every_channel
async def test_requests_are_spread_evenly_or_go_where_they_were_told(channel: Channel, sims: Deployments) -> None:
    async with open_client(channel, sims) as client:
        requests = requests_of(client, 10, max_tokens=50, ignore_eos=True)
        picks = Counter([(await client.add_request_async(request)).rank for request in requests])
        assert picks == {0: 5, 1: 5}
        pinned = make_request(client)
        assert (await client.add_request_async(pinned, 1)).rank == 1
        with pytest.raises(InvalidRequestError, match="valid: 0, 1"):
            await client.add_request_async(make_request(client), 2)
        await finish(client, *requests, pinned)


@every_channel
async def test_an_abort_ends_all_samples_or_the_one_named_and_an_unknown_one_nothing(
    channel: Channel, sims: Deployments
) -> None:
    async with open_client(channel, sims) as client:
        first, second, other = (make_request(client, max_tokens=FOREVER, ignore_eos=True) for _ in range(3))
        second.request_id, second.sample_index = first.request_id, 1
        for request in (first, second, other):
            await client.add_request_async(request)
        await client.abort_requests_async([first.request_id], 1)
        assert await next_ends(client, 1) == {(first.request_id, 1): [FinishReason.ABORT]}
        await client.abort_requests_async([123456, first.request_id, other.request_id])
        aborted = {(first.request_id, 0): [FinishReason.ABORT], (other.request_id, 0): [FinishReason.ABORT]}
        assert await next_ends(client, 2) == aborted
        assert client.statistics()["in_flight"] == 0


async def next_ends(client: Client, count: int) -> dict[tuple[int, int], list[FinishReason]]:
    found: dict[tuple[int, int], list[FinishReason]] = {}
    async with asyncio.timeout(DEADLINE_S):
        while sum(map(len, found.values())) < count:
            for output in (await client.get_output_async()).outputs:
                if output.finish_reason is not None:
                    key = (output.request_id, output.sample_index)
                    found.setdefault(key, []).append(output.finish_reason)
    return found


@every_channel
async def test_odd_requests_fail_alone(channel: Channel, sims: Deployments) -> None:
    async with open_client(channel, sims) as client:
        good = make_request(client, max_tokens=20)
        odd = {
            "makes its request fail": make_request(client, bytes([FAIL])),
            "prompt is empty": make_request(client, b""),
            "max_model_len": make_request(client, b"x" * 9000),
        }
        for request in (good, *odd.values()):
            await client.add_request_async(request)
        outputs = await finish(client, good, *odd.values())
        assert ends(outputs[good.request_id]) == [FinishReason.LENGTH]
        for reason, request in odd.items():
            (end,) = outputs[request.request_id]
            assert end.finish_reason is FinishReason.ERROR
            assert reason in (end.error or "")


@every_channel
async def test_a_utility_call_returns_one_result_per_rank_or_names_those_that_failed(
    channel: Channel, sims: Deployments
) -> None:
    async with open_client(channel, sims) as client:
        assert set(await client.call_utility_async("reset_prefix_cache")) == {0, 1}
        with pytest.raises(UtilityError, match=r"no_such_method failed on rank 0: .*rank 1: ") as caught:
            await client.call_utility_async("no_such_method")
        assert set(caught.value.failures) == {0, 1}
        with pytest.raises(UtilityError, match="object cannot travel"):
            await client.call_utility_async("reset_prefix_cache", object())
        assert client.statistics()["utility_calls"] == 0


@every_channel
async def test_streams_of_engines_that_die_go_on_elsewhere_and_what_kills_them_ends(
    channel: Channel, sims: Deployments, mortal_sims: Deployments
) -> None:
    """The poison kills the rank it was sent to and the one it moved to; each stream ends as if nothing had been."""
    async with open_client(Channel.INPROC, sims) as unbroken:
        expected = await answers(unbroken, 9, max_tokens=150, ignore_eos=True)
    async with open_client(channel, mortal_sims) as client:
        requests = requests_of(client, 9, max_tokens=150, ignore_eos=True)
        for request in requests:
            await client.add_request_async(request)
        poison = make_request(client, bytes([CRASH]))
        assert await client.add_request_async(poison, 0) == EngineId(0, 1)
        outputs = await finish(client, *requests, poison)
        assert ends(outputs[poison.request_id]) == [FinishReason.ERROR]
        assert "SimulatedCrashError" in (outputs[poison.request_id][-1].error or "")
        assert all(ends(outputs[request.request_id]) == [FinishReason.LENGTH] for request in requests)
        assert [tokens(outputs[request.request_id]) for request in requests] == expected
        dead = {view.engine_id.rank for view in client.engine_views() if view.state == "dead"}
        assert len(dead) == 2
        assert 0 in dead


@every_channel
async def test_closing_ends_every_wait_and_can_be_repeated(channel: Channel, sims: Deployments) -> None:
    async with open_client(channel, sims) as client:
        waiting = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0)
        await asyncio.gather(client.aclose(), client.aclose())
        for call in (waiting, client.get_output_async(), client.add_request_async(make_request(client))):
            with pytest.raises(EngineDeadError):
                await call
        with pytest.raises(EngineDeadError):
            await client.call_utility_async("reset_prefix_cache")
        await client.aclose()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployments]:
    from tests.unit.runner.families import save_family

    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_family("llama", folder)
    model = ModelConfig(model=str(folder), dtype="float32", device="cpu")
    config = EngineConfig(kind=EngineKind.TORCH, model=model, scheduler=SchedulerConfig(kv_cache_memory_bytes=KV_BYTES))
    with ExitStack() as stack:
        yield Deployments(stack, 1, config, Transport.CURVE)


async def test_the_torch_core_behaves_alike_in_this_process_and_over_a_line_with_keys(tiny: Deployments) -> None:
    async with open_client(Channel.CURVE, tiny) as client, open_client(Channel.INPROC, tiny) as reference:
        assert await answers(client, 6, max_tokens=8, ignore_eos=True) == await answers(
            reference, 6, max_tokens=8, ignore_eos=True
        )
        for either in (client, reference):
            endless = make_request(either, b"a prompt", max_tokens=400, ignore_eos=True)
            await either.add_request_async(endless)
            await either.get_output_async()
            await either.abort_requests_async([endless.request_id])
            assert await next_ends(either, 1) == {(endless.request_id, 0): [FinishReason.ABORT]}
            assert set(await either.call_utility_async("reset_prefix_cache")) == {0}
            with pytest.raises(UtilityError):
                await either.call_utility_async("no_such_method")


# --- tensors --------------------------------------------------------------------------------------------------------


def numbers(index: int, num_rows: int) -> Tensor:
    rows = random.Random(index).randbytes(num_rows * HIDDEN * 2)
    return Tensor("float16", (num_rows, HIDDEN), rows)


def request_of(client: Client, embeds: Tensor | None, pooling: PoolingParams | None, prompt: list[int]) -> AddRequest:
    sampling = SamplingParams(0 if pooling else 8, seed=3)
    request = AddRequest(client.client_id, 0, client.request_ids.draw(), 0, 0, prompt, [], sampling)
    request.prompt_embeds, request.pooling = embeds, pooling
    return request


async def tensor_answers(client: Client) -> list[tuple[list[int], Tensor | None]]:
    """Return what comes of embeddings of many sizes, small and large, and of prompts that are pooled."""
    tensors = [numbers(index, num_rows) for index, num_rows in enumerate((1, 30, 2000, 5000))]
    requests = [request_of(client, embeds, None, [0] * embeds.shape[0]) for embeds in tensors]
    requests += [request_of(client, None, PoolingParams(), [10 + index] * 50) for index in range(20)]
    requests += [request_of(client, tensors[2], PoolingParams(), [0] * 2000)]
    for request in requests:
        await client.add_request_async(request)
    outputs = await finish(client, *requests)
    return [_answer(outputs[request.request_id]) for request in requests]


def _answer(outputs: list[EngineCoreOutput]) -> tuple[list[int], Tensor | None]:
    *_, last = outputs
    assert last.finish_reason in (FinishReason.LENGTH, FinishReason.STOP), last.error
    return [token for output in outputs for token in output.new_token_ids], last.pooled


@every_channel
async def test_embeddings_and_vectors_are_the_same_over_every_line(channel: Channel, sims: Deployments) -> None:
    async with open_client(channel, sims) as client, open_client(Channel.INPROC, sims) as reference:
        found = await tensor_answers(client)
        assert found == await tensor_answers(reference)
        assert [len(tokens) for tokens, _ in found] == [8] * 4 + [0] * 21
        assert len({bytes(pooled.data) for _, pooled in found if pooled is not None}) == 21
        for _, pooled in found[4:]:
            assert pooled is not None
            assert sum(x * x for x in struct.unpack(f"<{HIDDEN}f", pooled.data)) == pytest.approx(1.0)
