"""The same prompts give the same text in one process and over real sockets to engines in processes of their own."""

import random
from typing import Any

from client.dplb_async_mp_client import DPLBAsyncMPClient
from metrics.stats import ServingStats
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.offline import LLM
from orchestrator.llm.params import GenerationParams
from orchestrator.llm.tokenizer import byte_tokenizer
from tests.contract.deployment import deployment

FAIL = 254
STEP_MS = 1.0
PROMPTS: list[str | list[int]] = [f"prompt {index}" for index in range(12)] + [[FAIL]]
PARAMS = GenerationParams(n=2, max_tokens=40, seed=11, stop=("th", "e "))

Answer = list[tuple[str, str | None]] | str
"""Text and finish reason of each sample, or the error of the request."""


def offline_answers() -> list[Answer]:
    options: dict[str, Any] = {"sim_step_ms": STEP_MS, "sim_fail_on_token": FAIL, "progress": False}
    with LLM(engine="sim", data_parallel_size=2, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    return [
        str(output.error) if output.error else [(sample.text, sample.finish_reason) for sample in output.outputs]
        for output in outputs
    ]


async def served_answers(client: DPLBAsyncMPClient) -> list[Answer]:
    llm = AsyncLLM(client, byte_tokenizer(), ServingStats(), random.Random(1))
    llm.start()
    try:
        streams = [await llm.generate([prompt], PARAMS) for prompt in PROMPTS]
        answers: list[Answer] = []
        for stream in streams:
            await stream.wait_finished()
            choices = [(choice.take_text(), choice.finish_reason) for choice in stream.choices]
            answers.append(str(stream.error) if stream.error else choices)
        return answers
    finally:
        await llm.aclose()


async def test_offline_and_served_answers_are_the_same() -> None:
    offline = offline_answers()
    async with deployment(2, step_s=STEP_MS / 1000, fail_on_token=FAIL) as group, group.client(2) as client:
        assert await served_answers(client) == offline
    reasons = {reason for answer in offline if isinstance(answer, list) for _, reason in answer}
    assert reasons == {"stop", "length"}, "prompts that show both"
