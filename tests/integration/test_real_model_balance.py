"""The main job on the real model: the official OpenAI client, two ranks in two Ray actors, many callers at once."""

import asyncio
from typing import Any

import openai
import pytest

from tests.integration.serving import deployment, ranks_of

MODEL = "smollm2-135m"
NUM_CHATS = 200
CONCURRENCY = 32
MAX_TOKENS = 6

pytestmark = [pytest.mark.ray, pytest.mark.model]


async def test_two_hundred_chats_are_answered_and_shared_by_two_ranks() -> None:
    with deployment("--model", MODEL, "--data-parallel-size", "2", "--max-model-len", "256") as served:
        url = await asyncio.to_thread(served.wait_ready)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            ends = await _all_ends(client)
        ranks = ranks_of(url)
    assert len(ends) == NUM_CHATS
    assert set(ends) <= {"stop", "length"}
    assert len({rank["pid"] for rank in ranks.values()}) == 2
    picks = [rank["picks"] for rank in ranks.values()]
    assert sum(picks) == NUM_CHATS
    assert all(0.4 <= count / NUM_CHATS <= 0.6 for count in picks), picks


async def _all_ends(client: openai.AsyncOpenAI) -> list[str]:
    """Return why each answer ended; callers take the next number until there is none."""
    numbers = iter(range(NUM_CHATS))

    async def call_until_done() -> list[str]:
        return [await (_streamed if number % 2 else _whole)(client, number) for number in numbers]

    ends = await asyncio.gather(*(call_until_done() for _ in range(CONCURRENCY)))
    return [end for caller in ends for end in caller]


def _question(number: int) -> Any:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"What is {number} plus {number}?"}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }


async def _whole(client: openai.AsyncOpenAI, number: int) -> str:
    answer = await client.chat.completions.create(**_question(number))
    assert answer.choices[0].message.content
    return str(answer.choices[0].finish_reason)


async def _streamed(client: openai.AsyncOpenAI, number: int) -> str:
    stream = await client.chat.completions.create(**_question(number), stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in chunks)
    return str(chunks[-1].finish_reason)
