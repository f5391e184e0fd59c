"""The facade over a client that is scripted: what the real one does in rare moments."""

import pytest

from engine.wire.errors import EngineDeadError, InvalidRequestError, OverloadedError
from engine.wire.messages import FinishReason
from orchestrator.llm.params import GenerationParams
from orchestrator.llm.tokenizer import byte_tokenizer
from tests.unit.llm.scripted_client import ScriptedClient, ends_of, facade


async def test_a_prompt_travels_as_ids_and_comes_back_as_text() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["abc"], GenerationParams(max_tokens=2))
        (request,) = client.sent
        assert request.prompt_token_ids == list(b"abc")
        client.say(request, "x")
        client.say(request, "y", FinishReason.LENGTH)
        assert await ends_of(stream) == [("xy", "length")]
    assert client.aborted == []


async def test_samples_share_the_request_and_the_seed_but_prompts_do_not() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        await llm.generate(["a", "a"], GenerationParams(n=2, max_tokens=1))
        first, second, third, fourth = client.sent
    assert [request.sample_index for request in client.sent] == [0, 1, 0, 1]
    assert first.request_id == second.request_id != third.request_id == fourth.request_id
    assert first.sampling.seed == second.sampling.seed != third.sampling.seed


async def test_a_refusal_half_way_takes_back_what_was_sent() -> None:
    client = ScriptedClient()
    client.refuse_after = 2
    async with facade(client) as llm:
        with pytest.raises(OverloadedError):
            await llm.generate(["a"], GenerationParams(n=3, max_tokens=1))
        assert llm.statistics()["open_choices"] == 0
    request_id = client.sent[0].request_id
    assert {(request_id, 0), (request_id, 1)} <= set(client.aborted)


async def test_a_stop_string_aborts_that_sample_on_its_engine() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["a"], GenerationParams(n=2, max_tokens=9, stop=("!",)))
        first, second = client.sent
        client.say(second, "x!")
        client.say(first, "y", FinishReason.LENGTH)
        assert await ends_of(stream) == [("y", "length"), ("x", "stop")]
    assert client.aborted == [(second.request_id, 1)]


async def test_closing_ends_every_open_stream_with_abort() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["a"], GenerationParams(max_tokens=9))
    assert await ends_of(stream) == [("", "abort")]
    assert client.aborted == [(client.sent[0].request_id, 0)]


async def test_the_end_of_the_line_fails_every_stream_and_is_seen() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["a"], GenerationParams(max_tokens=9))
        client.end(EngineDeadError("cut"))
        await llm.wait_closed()
        with pytest.raises(EngineDeadError, match="cut"):
            await ends_of(stream)


async def test_an_unforeseen_end_of_the_output_loop_fails_every_stream_too() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        stream = await llm.generate(["a"], GenerationParams(max_tokens=9))
        client.end(RuntimeError("bug"))
        await llm.wait_closed()
        with pytest.raises(EngineDeadError, match="bug"):
            await ends_of(stream)


async def test_priority_and_salt_travel_with_every_sample_and_are_the_usual_ones_unless_given() -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        await llm.generate(["a"], GenerationParams(n=2, max_tokens=1, priority=-3, cache_salt="mine"))
        await llm.generate(["a"], GenerationParams(max_tokens=1))
    assert [(request.priority, request.cache_salt) for request in client.sent] == [(-3, "mine")] * 2 + [(0, None)]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (GenerationParams(priority=1 << 63), "priority"),
        (GenerationParams(priority=-(1 << 63) - 1), "priority"),
        (GenerationParams(cache_salt=""), "cache_salt"),
        (GenerationParams(cache_salt="\ud800"), "cache_salt"),
    ],
)
async def test_a_priority_or_a_salt_that_cannot_travel_is_refused_by_field(
    params: GenerationParams, field: str
) -> None:
    client = ScriptedClient()
    async with facade(client) as llm:
        with pytest.raises(InvalidRequestError) as caught:
            await llm.generate(["a"], params)
    assert caught.value.field == field
    assert client.sent == []


async def test_before_the_first_engine_there_is_no_room() -> None:
    client = ScriptedClient()
    client.ready = None
    async with facade(client) as llm:
        with pytest.raises(OverloadedError):
            await llm.generate(["a"], GenerationParams())


@pytest.mark.parametrize("prompt", ["x" * 50, [256], [-1], [], ""])
async def test_prompts_the_model_cannot_take_are_refused_by_field(prompt: str | list[int]) -> None:
    async with facade(ScriptedClient()) as llm:
        with pytest.raises(InvalidRequestError) as caught:
            await llm.generate([prompt], GenerationParams())
    assert caught.value.field == "prompt"


async def test_a_model_without_a_template_does_not_chat() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    async with facade(ScriptedClient(), tokenizer) as llm:
        with pytest.raises(InvalidRequestError, match="completions"):
            await llm.chat([{"role": "user", "content": "hi"}], GenerationParams())
