"""Many prompts through the facade, so many at a time that every engine is full and picks still follow the load."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.wire.errors import ShoalError
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.params import GenerationParams
from orchestrator.llm.request_output import RequestOutput, finished_output


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to finish. encode: makes its text, if it has one, and its token ids; may raise ``ShoalError``."""

    encode: Callable[[], tuple[str | None, list[int]]]
    params: GenerationParams


async def run_batch(
    llm: AsyncLLM, jobs: Sequence[Job], num_open: int, on_done: Callable[[RequestOutput], None]
) -> list[RequestOutput]:
    """Finish every job; return the outputs in the order of the jobs. A job that fails fails alone.

    num_open: jobs under way at once. All at once would fix every pick before the first token is known, and the rank
        that got the long ones would end last.
    on_done: called with each output as it comes. Cancelling frees what is under way.
    """
    outputs: dict[int, RequestOutput] = {}
    waiting = iter(enumerate(jobs))

    async def work() -> None:
        for index, job in waiting:  # shared: each takes the next one
            outputs[index] = await _finish(llm, job)
            on_done(outputs[index])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(num_open, len(jobs))):
            group.create_task(work())
    return [outputs[index] for index in range(len(jobs))]


async def _finish(llm: AsyncLLM, job: Job) -> RequestOutput:
    prompt: str | None = None
    token_ids: list[int] = []
    try:
        prompt, token_ids = job.encode()
        stream = await llm.generate([token_ids], job.params)
    except ShoalError as error:
        return RequestOutput(prompt=prompt, prompt_token_ids=token_ids, outputs=[], error=error)
    try:
        await stream.wait_finished()
    except asyncio.CancelledError:
        await llm.abort(stream)
        raise
    return finished_output(prompt, token_ids, stream)
