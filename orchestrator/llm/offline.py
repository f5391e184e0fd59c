"""Offline use: the engines in this process, prompts in, finished texts out.

with LLM("smollm2-135m", data_parallel_size=2) as llm:
    for output in llm.generate(["A shoal is", "A school is"], GenerationParams(max_tokens=20)):
        print(output.prompt, output.outputs[0].text)
"""

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from client.inproc_client import InprocClient, MakeCore
from client.tasks import LoopThread
from engine.config.engine_config import EngineConfig
from engine.model.names import ResolvedModel, resolve_model
from engine.wire.errors import EngineDeadError, InvalidRequestError
from engine.wire.ids import EngineId
from engine.wire.states import EngineState
from engine.wire.tensors import Tensor
from lb.views.engine_view import EngineView
from metrics.stats import ServingStats
from orchestrator.config.engine_config import engine_config
from orchestrator.config.serve_config import ServeConfig
from orchestrator.config.sources import ConfigError, Setting, nearest, validate
from orchestrator.llm.async_llm import AsyncLLM
from orchestrator.llm.batch import Encode, Job, embed_one, generate_one, loading_status, prompts_bar, run_batch
from orchestrator.llm.chat_template import Message
from orchestrator.llm.embeds import from_array
from orchestrator.llm.logprobs import TokenLogprob
from orchestrator.llm.params import GenerationParams
from orchestrator.llm.request_output import CompletionOutput, EmbeddingOutput, RequestMetrics, RequestOutput
from orchestrator.llm.tokenizer import TextTokenizer, load_tokenizer
from orchestrator.processes.tokenizer_export import find_tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "GenerationParams",
    "RequestMetrics",
    "RequestOutput",
    "TokenLogprob",
]

_log = logging.getLogger(__name__)

Prompt = str | list[int] | Any
"""A text, token ids, or their embeddings: a matrix [num_tokens, hidden_size] of NumPy, torch or the like."""

Params = GenerationParams | Sequence[GenerationParams] | None
"""One for all prompts, or one for each; None takes the defaults."""

Conversation = Sequence[Message]
Output = TypeVar("Output", RequestOutput, EmbeddingOutput)

_OPEN_PER_SLOT = 2
"""Prompts under way per sequence that the engines can run at once: one that runs and one that waits to."""

# Groups and options of ``ServeConfig`` that mean something without a server.
_GROUPS = frozenset({"model", "engine", "parallelism", "scheduler", "sim"})
_SERVED_ONLY = frozenset({"served_model_name", "sim_report_delay_s"})


class LLM:
    """Generates text on engines in threads of this process. To be closed, or used in a ``with`` block.

    Everything behind it is what ``shoal serve`` runs: picks, scheduler, detokenising, stop strings. Its methods may be
    called from several threads at once, also where an event loop runs.
    """

    def __init__(self, model: str | None = None, *, progress: bool = True, **options: Any) -> None:
        """Load every rank.

        model: known name, local folder, ``.gguf`` file or hub name; not needed with ``engine="sim"``.
        progress: show on standard error what is being loaded.
        options: those of ``shoal serve`` about model, engine, parallelism, scheduler and sim, spelled with underscores:
            ``data_parallel_size``, ``dtype``, ``device``, ``max_model_len``, ``num_threads``, ``kv_cache_memory`` ...

        Raises:
            StartupError: an unknown option, a wrong value, or a model that cannot be loaded; names it.
        """
        config = offline_config({"model": model, **options})
        resolved = resolve_model(config.model) if config.engine == "torch" and config.model is not None else None
        self._num_open = _OPEN_PER_SLOT * config.max_num_seqs * config.data_parallel_size
        loop = LoopThread("llm")
        try:
            self._tokenizer = _load_tokenizer(loop, resolved)
            with loading_status(shown=progress) as show:
                make_core = _core_maker(engine_config(config, resolved, config.device), show)
                client = InprocClient(make_core, config.data_parallel_size)
            self._llm = AsyncLLM(client, self._tokenizer, ServingStats(), keep_token_ids=True)
            loop.run(_start(self._llm))
        except BaseException:
            loop.stop()
            loop.join()
            raise
        self._loop = loop
        self._finalizer = weakref.finalize(self, _finalize, loop, self._llm, client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: bool = True
    ) -> list[RequestOutput]:
        """Continue each prompt, a text, token ids or embeddings; return the outputs in the order of the prompts.

        A prompt that fails, or is refused, fails alone: its output has ``error`` set.
        progress: show a bar on standard error.

        Raises:
            TypeError: a prompt is no prompt. ValueError: not as many params as prompts.
            EngineDeadError: closed, or no engine is left.
        """
        batch = _as_prompts(prompts)
        return self._run([partial(_encode_prompt, self._tokenizer, prompt) for prompt in batch], params, progress)

    def chat(
        self, messages: Conversation | Sequence[Conversation], params: Params = None, *, progress: bool = True
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; see ``generate``.

        Raises:
            InvalidRequestError: the model has no chat template.
        """
        if self._tokenizer.chat_template is None:
            raise InvalidRequestError("this model has no chat template: use generate", "messages")
        batch = _as_conversations(messages)
        return self._run([partial(_encode_messages, self._tokenizer, chat) for chat in batch], params, progress)

    def embed(
        self,
        prompts: str | list[int] | Sequence[str | list[int]],
        *,
        dimensions: int | None = None,
        progress: bool = True,
    ) -> list[EmbeddingOutput]:
        """Return one vector of length 1 per prompt, a text or token ids, in the order of the prompts.

        A prompt that fails, or is refused, fails alone: its output has ``error`` set.
        dimensions: keep so many numbers of each. progress: show a bar on standard error.

        Raises:
            TypeError: a prompt is no prompt. EngineDeadError: closed, or no engine is left.
        """
        self._check_alive()
        batch = _as_prompts(prompts, with_embeds=False)
        work = [
            partial(embed_one, self._llm, partial(_encode_prompt, self._tokenizer, prompt), dimensions)
            for prompt in batch
        ]
        with prompts_bar(len(work), shown=progress) as show:
            outputs = self._loop.run(run_batch(work, self._num_open, lambda done: show(len(done.prompt_token_ids))))
        return _with_failures_logged(outputs)

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every rank."""
        return self._llm.engine_views()

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        return self._llm.statistics()

    def close(self) -> None:
        """End the engines and free what they hold; idempotent. What other threads still generate ends with abort."""
        self._finalizer()
        self._loop.join()

    def _run(self, prompts: list[Encode], params: Params, progress: bool) -> list[RequestOutput]:
        self._check_alive()
        jobs = [Job(encode, own) for encode, own in zip(prompts, _per_prompt(params, len(prompts)), strict=True)]
        num_samples = max((job.params.n for job in jobs), default=1)
        num_open = max(1, self._num_open // num_samples)
        work = [partial(generate_one, self._llm, job) for job in jobs]
        with prompts_bar(len(jobs), shown=progress) as show:
            outputs = self._loop.run(run_batch(work, num_open, lambda done: show(_num_drawn(done))))
        return _with_failures_logged(outputs)

    def _check_alive(self) -> None:
        if not self._finalizer.alive:
            raise EngineDeadError("this LLM is closed")
        views = self.engine_views()
        if all(view.state is EngineState.DEAD for view in views):
            raise EngineDeadError("; ".join(f"engine {view.engine_id}: {view.reason}" for view in views))


def offline_options() -> frozenset[str]:
    """Return the names that offline use takes."""
    return (
        frozenset(
            name
            for name, field in ServeConfig.model_fields.items()
            if isinstance(field.json_schema_extra, dict) and field.json_schema_extra["group"] in _GROUPS
        )
        - _SERVED_ONLY
    )


def offline_config(options: Mapping[str, Any]) -> ServeConfig:
    """Return the configuration; what has no meaning here keeps its default.

    Raises:
        ConfigError: an option that does not exist or needs a server, or a value it cannot take; names it.
    """
    known = offline_options()
    for name in options:
        if name in ServeConfig.model_fields and name not in known:
            raise ConfigError(f"{name} is an option of `shoal serve`; there is no server here")
        if name not in known:
            raise ConfigError(f"unknown option {name}{nearest(name, known)}")
    settings = {name: Setting(value, name) for name, value in options.items()}
    return validate({**settings, "executor": Setting("local", "executor")})


def _num_drawn(output: RequestOutput) -> int:
    return sum(len(sample.token_ids) for sample in output.outputs)


def _with_failures_logged(outputs: list[Output]) -> list[Output]:
    num_failed = sum(output.error is not None for output in outputs)
    if num_failed:
        _log.warning("%d of %d prompts failed; their outputs say why", num_failed, len(outputs))
    return outputs


async def _start(llm: AsyncLLM) -> None:
    llm.start()


async def _end(llm: AsyncLLM, client: InprocClient) -> None:
    await llm.aclose()
    await client.aclose()


def _finalize(loop: LoopThread, llm: AsyncLLM, client: InprocClient) -> None:
    """End what a dropped ``LLM`` left, also at the interpreter's exit.

    Garbage collection may run this in any thread, one of its own included, so only the main thread waits.
    """
    loop.stop(partial(_end, llm, client))
    if threading.current_thread() is threading.main_thread():
        loop.join()


def _load_tokenizer(loop: LoopThread, model: ResolvedModel | None) -> TextTokenizer:
    if model is None:
        return load_tokenizer(None)
    return load_tokenizer(Path(loop.run(find_tokenizer(model, lambda text: _log.info("%s", text)))))


def _core_maker(config: EngineConfig, show: Callable[[str], None]) -> MakeCore:
    # Only here: an import of this module for its types loads no engine.
    from engine.loading import load_rank

    def make(engine_id: EngineId) -> Any:
        def on_progress(doing: str, progress: float) -> None:
            show(f"rank {engine_id.rank}: {doing} ({progress:.0%})")

        return load_rank(config, engine_id, on_progress)

    return make


def _encode_prompt(tokenizer: TextTokenizer, prompt: Prompt) -> tuple[str | None, list[int] | Tensor]:
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt, add_special_tokens=True)
    return None, prompt if isinstance(prompt, list) else from_array(prompt)


def _encode_messages(tokenizer: TextTokenizer, messages: Conversation) -> tuple[str | None, list[int]]:
    assert tokenizer.chat_template is not None, "checked before"
    text = tokenizer.chat_template.render(messages)
    return text, tokenizer.encode(text, add_special_tokens=False)


def _as_prompts(prompts: Any, *, with_embeds: bool = True) -> list[Prompt]:
    if isinstance(prompts, str) or hasattr(prompts, "__array__") or (prompts and isinstance(prompts[0], int)):
        batch = [prompts]
    else:
        batch = list(prompts)
    for index, prompt in enumerate(batch):
        if not isinstance(prompt, str | list) and not (with_embeds and hasattr(prompt, "__array__")):
            kinds = "a text, a list of token ids or an array of embeddings" if with_embeds else "a text or token ids"
            raise TypeError(f"prompt {index} is a {type(prompt).__name__}; a prompt is {kinds}")
    return batch


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if messages and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return list(cast(Sequence[Conversation], messages))


def _per_prompt(params: Params, num_prompts: int) -> list[GenerationParams]:
    if params is None or isinstance(params, GenerationParams):
        return [params or GenerationParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} params for {num_prompts} prompts: give one for all, or one for each")
    return list(params)
