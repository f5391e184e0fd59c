"""Batches of prompts through ``AsyncLLM``: a bounded number under way at once, an output for each, and a bar."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.wire.errors import ShoalError
from engine.wire.tensors import Tensor
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.params import GenerationParams
from orchestrator.llm.request_output import EmbeddingOutput, RequestOutput, embedded_output, finished_output
from orchestrator.llm.stream import RequestStream

T = TypeVar("T")

Encode = Callable[[], tuple[str | None, list[int] | Tensor]]
"""Makes the text of one prompt, if it has one, and its token ids or their embeddings; may raise ``ShoalError``."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to finish."""

    encode: Encode
    params: GenerationParams


async def run_batch(
    work: Sequence[Callable[[], Coroutine[Any, Any, T]]], num_open: int, on_done: Callable[[T], None]
) -> list[T]:
    """Finish all the work; return the outputs in its order.

    num_open: pieces under way at once. All at once would fix every pick before the first token is known, and the rank
        that got the long ones would end last.
    on_done: called with each output as it comes. Cancelling frees what is under way.
    """
    outputs: dict[int, T] = {}
    waiting = iter(enumerate(work))

    async def work_off() -> None:
        for index, piece in waiting:  # one iterator for all of these: each takes the next piece
            outputs[index] = await piece()
            on_done(outputs[index])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(num_open, len(work))):
            group.create_task(work_off(), name="llm-batch")
    return [outputs[index] for index in range(len(work))]


async def generate_one(llm: AsyncLLM, job: Job) -> RequestOutput:
    """Finish one prompt; one that is refused or fails has ``error`` set."""
    prompt: str | None = None
    token_ids: list[int] = []
    try:
        prompt, encoded = job.encode()
        token_ids = encoded if isinstance(encoded, list) else []
        stream = await llm.generate([encoded], job.params)
    except ShoalError as error:
        return RequestOutput(prompt=prompt, prompt_token_ids=token_ids, outputs=[], error=error)
    await _finished(llm, stream)
    return finished_output(prompt, token_ids, stream)


async def embed_one(llm: AsyncLLM, encode: Encode, dimensions: int | None) -> EmbeddingOutput:
    """Work out the vector of one prompt; one that is refused or fails has ``error`` set."""
    prompt: str | None = None
    token_ids: list[int] = []
    try:
        prompt, encoded = encode()
        assert isinstance(encoded, list), "vectors are made of tokens"
        token_ids = encoded
        stream = await llm.embed([token_ids], dimensions=dimensions)
    except ShoalError as error:
        return EmbeddingOutput(prompt=prompt, prompt_token_ids=token_ids, embedding=[], error=error)
    await _finished(llm, stream)
    return embedded_output(prompt, token_ids, stream, dimensions)


async def _finished(llm: AsyncLLM, stream: RequestStream) -> None:
    try:
        await stream.wait_finished()
    except asyncio.CancelledError:
        await llm.abort(stream)
        raise


@contextmanager
def loading_status(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show in one line what is being loaded; yields the function that changes it."""
    if not shown:
        yield lambda _text: None
        return
    with Console(stderr=True).status("loading") as status:
        yield status.update


@contextmanager
def prompts_bar(num_prompts: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of finished prompts and the tokens per second so far.

    Yields the function that takes the number of tokens of each prompt as it ends, in any thread.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    num_tokens = 0
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        bar.add_task("prompts", total=num_prompts, rate="")
        (task,) = bar.tasks

        def on_done(count: int) -> None:
            nonlocal num_tokens
            num_tokens += count
            rate = num_tokens / task.elapsed if task.elapsed else 0.0
            bar.update(task.id, advance=1, rate=f"{rate:,.0f} tokens/s")

        yield on_done
