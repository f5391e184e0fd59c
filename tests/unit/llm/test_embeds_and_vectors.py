"""Prompts of embeddings and vectors of prompts, as the facade checks and sends them."""

import gc
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.wire.errors import InvalidRequestError, OverloadedError
from engine.wire.messages import EngineCoreOutput, FinishReason
from engine.wire.sampling import PoolingParams
from engine.wire.tensors import Tensor
from orchestrator.llm.embeds import EmbedsBudget, from_array
from orchestrator.llm.limits import MAX_EMBEDS_BYTES
from orchestrator.llm.params import GenerationParams
from tests.unit.llm.scripted_client import READY, ScriptedClient, facade

HIDDEN = 4
PARAMS = GenerationParams(max_tokens=5)


def embeds(num_rows: int = 3, hidden: int = HIDDEN, dtype: str = "float32") -> Tensor:
    return Tensor(dtype, (num_rows, hidden), bytes(num_rows * hidden * {"float32": 4, "float64": 8}[dtype]))


def make_client(*features: str) -> ScriptedClient:
    client = ScriptedClient()
    client.ready = replace(READY, features=features or ("prompt_embeds", "pooling", "logprobs"), hidden_size=HIDDEN)
    return client


def vector(client: ScriptedClient, index: int, value: Tensor) -> None:
    request = client.sent[index]
    output = EngineCoreOutput(request.request_id, 0, 0, 0, [], FinishReason.STOP, num_cached_tokens=index, pooled=value)
    output.queue_time_s = 0.01  # as with whatever ends an attempt that has run
    client.put(output)


# --- prompts of embeddings ------------------------------------------------------------------------------------------


async def test_embeddings_travel_with_placeholders_and_are_shared_by_the_samples() -> None:
    client, prompt = make_client(), embeds()
    async with facade(client) as llm:
        stream = await llm.generate([prompt], GenerationParams(max_tokens=5, n=2))
    assert [request.prompt_token_ids for request in client.sent] == [[0, 0, 0]] * 2
    assert all(request.prompt_embeds is prompt for request in client.sent)
    assert stream.num_prompt_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "params", "field", "words"),
    [
        (embeds(hidden=5), PARAMS, "prompt_embeds", r"\[3, 5\].*\[number of tokens, 4\]"),
        (Tensor("float32", (4,), bytes(16)), PARAMS, "prompt_embeds", r"\[4\]"),
        (embeds(dtype="float64"), PARAMS, "prompt_embeds", "float64"),
        (embeds(0), PARAMS, "prompt", "empty"),
        (embeds(50), PARAMS, "prompt", "50 tokens"),
        (embeds(), GenerationParams(echo=True), "echo", "prompt_embeds"),
        (embeds(), GenerationParams(prompt_logprobs=1), "prompt_logprobs", "prompt_embeds"),
    ],
)
async def test_embeddings_that_cannot_be_served_are_refused(
    prompt: Tensor, params: GenerationParams, field: str, words: str
) -> None:
    client = make_client()
    async with facade(client) as llm:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            await llm.generate([prompt], params)
    assert caught.value.field == field
    assert not client.sent


async def test_embeddings_times_samples_are_bounded() -> None:
    client = make_client()
    assert client.ready is not None
    client.ready = replace(client.ready, max_model_len=10_000_000)
    async with facade(client) as llm:
        with pytest.raises(InvalidRequestError, match="limit"):
            await llm.generate([embeds(MAX_EMBEDS_BYTES // 16 // 100)], GenerationParams(max_tokens=5, n=101))


async def test_engines_that_take_no_embeddings_say_so() -> None:
    async with facade(make_client("logprobs")) as llm:
        with pytest.raises(InvalidRequestError, match="takes no prompt_embeds"):
            await llm.generate([embeds()], PARAMS)
        with pytest.raises(InvalidRequestError, match="gives no embeddings"):
            await llm.embed(["hello"])


def test_what_is_held_is_bounded_until_it_is_let_go() -> None:
    budget = EmbedsBudget(100)
    first, second = embeds(), embeds()
    budget.hold(first)
    budget.hold(second)
    assert budget.num_held_bytes == 96
    with pytest.raises(OverloadedError):
        budget.hold(embeds())
    del first
    gc.collect()
    assert budget.num_held_bytes == 48
    budget.hold(embeds())


async def test_the_facade_holds_embeddings_no_longer_than_its_client() -> None:
    client = make_client()
    async with facade(client) as llm:
        stream = await llm.generate([embeds()], PARAMS)
        assert llm.statistics()["embeds_bytes"] == 48
        client.say(client.sent.pop(), "x", FinishReason.STOP)
        await stream.wait_finished()
        gc.collect()
        assert llm.statistics()["embeds_bytes"] == 0


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.ones((3, 2), dtype="f4"), "float32"),
        (np.ones((3, 2), dtype="f2"), "float16"),
        (np.ones((3, 2)), "float32"),
        (np.ones((2, 3), dtype=">f4").T, "float32"),
        (torch.ones(3, 2, dtype=torch.bfloat16), "float32"),
        (torch.ones(2, 3, requires_grad=True).T, "float32"),
        ([[1.0, 1.0]] * 3, "float32"),
    ],
)
def test_arrays_of_all_kinds_become_embeddings(value: Any, dtype: str) -> None:
    tensor = from_array(value)
    assert (tensor.dtype, tensor.shape) == (dtype, (3, 2))
    assert (np.frombuffer(tensor.data, {"float32": "<f4", "float16": "<f2"}[dtype]) == 1.0).all()


@pytest.mark.parametrize("value", [np.ones(3), np.ones((3, 2), dtype=int), np.full((1, 2), np.nan), np.ones((0, 2))])
def test_arrays_that_are_no_embeddings_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError):
        from_array(value)


# --- vectors --------------------------------------------------------------------------------------------------------


async def test_each_prompt_gets_its_vector() -> None:
    client = make_client()
    async with facade(client) as llm:
        stream = await llm.embed(["hello", [5, 6]])
        assert [request.prompt_token_ids for request in client.sent] == [list(b"hello"), [5, 6]]
        assert all(request.pooling == PoolingParams() for request in client.sent)
        values = [Tensor("float32", (1,), struct) for struct in (b"abcd", b"efgh")]
        for index in (1, 0):
            vector(client, index, values[index])
        await stream.wait_finished()
    assert [choice.pooled for choice in stream.choices] == values
    assert [choice.finish_reason for choice in stream.choices] == ["stop", "stop"]
    assert (stream.num_prompt_tokens, stream.num_output_tokens, stream.num_cached_tokens) == (7, 0, 1)


@pytest.mark.parametrize(
    ("prompts", "dimensions", "field", "words"),
    [
        ([""], None, "input", "empty"),
        ([[]], None, "input", "empty"),
        (["a", "x" * 51], None, "input", "51 tokens"),
        ([[256]], None, "input", "256"),
        (["a"], HIDDEN + 1, "dimensions", "have 4"),
    ],
)
async def test_vectors_that_cannot_be_given_are_refused(
    prompts: list[Any], dimensions: int | None, field: str, words: str
) -> None:
    client = make_client()
    async with facade(client) as llm:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            await llm.embed(prompts, dimensions=dimensions)
    assert caught.value.field == field
    assert not client.sent


async def test_a_prompt_to_be_pooled_may_fill_the_whole_context() -> None:
    async with facade(client := make_client()) as llm:
        await llm.embed(["x" * 50])
    assert len(client.sent) == 1


async def test_the_siblings_of_a_vector_that_fails_are_aborted() -> None:
    client = make_client()
    async with facade(client) as llm:
        stream = await llm.embed(["a", "b"])
        request = client.sent[0]
        failed = EngineCoreOutput(request.request_id, 0, 0, 0, [], FinishReason.ERROR, error="broken")
        client.put(failed)
        await stream.wait_finished()
        assert stream.error is not None
    assert client.aborted == [(client.sent[1].request_id, 0)]
