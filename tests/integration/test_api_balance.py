"""Many callers at once on four ranks: everyone is answered, and the ranks share the work."""

import asyncio
from typing import Any

import openai

from bench.local_deployment import MODEL_NAME, local_deployment
from engine.config.engine_config import SimConfig

NUM_REQUESTS = 2_000
CONCURRENCY = 32
NUM_RANKS = 4
MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def test_two_thousand_chats_are_answered_and_evenly_spread() -> None:
    with local_deployment(NUM_RANKS, SimConfig(step_s=0.002)) as deployment:
        async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
            lengths = await _all_answers(client)
        picks = [rank["picks"] for rank in deployment.get_json("/v1/cluster")["ranks"]]
    assert len(lengths) == NUM_REQUESTS
    assert set(lengths) == {4}
    assert sum(picks) == NUM_REQUESTS
    assert all(abs(count / NUM_REQUESTS - 1 / NUM_RANKS) <= 0.02 for count in picks), picks


async def _all_answers(client: openai.AsyncOpenAI) -> list[int]:
    """Return the length of every answer; callers take the next number until there is none."""
    numbers = iter(range(NUM_REQUESTS))

    async def call_until_done() -> list[int]:
        return [await (_streamed(client) if number % 2 else _whole(client)) for number in numbers]

    lengths = await asyncio.gather(*(call_until_done() for _ in range(CONCURRENCY)))
    return [length for caller in lengths for length in caller]


async def _whole(client: openai.AsyncOpenAI) -> int:
    answer = await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=4)
    return len(answer.choices[0].message.content or "")


async def _streamed(client: openai.AsyncOpenAI) -> int:
    stream = await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=4, stream=True)
    return sum([len(chunk.choices[0].delta.content or "") async for chunk in stream])
