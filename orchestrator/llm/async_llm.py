"""The text facade over the engines: prompts in, streams of text out. Text stops here; below travel only ids.

``generate`` reads as a request goes: encode, check, register, send. Outputs come back through ``_read_outputs``.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from client.core_client import GroupClient
from engine.wire.errors import EngineDeadError, InvalidRequestError
from engine.wire.messages import AddRequest, EngineCoreOutputs
from engine.wire.sampling import PoolingParams, SamplingParams
from engine.wire.tensors import Tensor
from lb.views.engine_view import EngineView
from metrics.stats import ServingStats
from orchestrator.llm.chat_template import Message
from orchestrator.llm.detokenizer import Detokenizer, StopChecker
from orchestrator.llm.embeds import EmbedsBudget
from orchestrator.llm.limits import ModelLimits, RuleEncoder, check_embeds_params, check_features, check_scheduling
from orchestrator.llm.logprobs import ChoiceLogprobs, TokenTexts
from orchestrator.llm.outputs import OutputProcessor, SequenceName
from orchestrator.llm.params import EncodedRules, GenerationParams
from orchestrator.llm.stream import Choice, RequestStream
from orchestrator.llm.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

Prompt = str | list[int] | Tensor
"""A text, its tokens, or their embeddings [num_tokens, hidden_size]."""

_INLINE_CHARACTERS = 2_000
"""Shorter texts are tokenised on the event loop: a trip to a thread costs as much as 100 tokens."""

_PROMPTS_PER_TURN = 16
_NUM_TOKENIZER_THREADS = 2


class AsyncLLM:
    """Generates text on the engines behind a client. Everything runs on one event loop.

    One task reads the client's outputs. Every stream that ``generate`` or ``chat`` returned ends exactly once, whatever
    happens: by its engine, by ``abort``, by the end of the client, by ``aclose``.
    """

    def __init__(
        self,
        client: GroupClient,
        tokenizer: TextTokenizer,
        stats: ServingStats,
        rng: random.Random | None = None,
        *,
        keep_token_ids: bool = False,
    ) -> None:
        """Wrap a client; ``aclose`` leaves it open.

        rng: draws the seeds callers do not give. keep_token_ids: choices keep their tokens besides the text.
        """
        self._client = client
        self._tokenizer = tokenizer
        self._stats = stats
        self._keep_token_ids = keep_token_ids
        self._rng = rng or random.SystemRandom()
        self._processor = OutputProcessor(stats)
        self._threads = ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, "tokenise")
        self._rules = RuleEncoder(tokenizer)
        self._texts = TokenTexts(tokenizer.backend)
        self._limits = ModelLimits()
        self._embeds_budget = EmbedsBudget()
        self._output_task: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[None]] = set()  # of sequences that ended here, on their engines

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start reading outputs on the running loop."""
        self._output_task = asyncio.create_task(self._read_outputs(), name="llm-outputs")

    async def wait_closed(self) -> None:
        """Wait until outputs can no longer come, which nothing but ``aclose`` should cause."""
        assert self._output_task is not None
        await asyncio.wait([self._output_task])

    async def aclose(self) -> None:
        """Abort every open stream and stop; idempotent."""
        await self.abort_all()
        if self._output_task is not None and not self._output_task.done():
            self._output_task.cancel()
            await asyncio.wait([self._output_task])
        await self._rules.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def engine_views(self) -> list[EngineView]:
        """Return what the client knows of each engine."""
        return self._client.engine_views()

    def statistics(self) -> dict[str, int]:
        """Return counters of this facade and of its client."""
        own = {
            "open_choices": self._processor.num_open,
            "outputs_for_unknown": self._processor.num_unknown,
            "embeds_bytes": self._embeds_budget.num_held_bytes,
        }
        return own | self._client.statistics()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def chat(self, messages: Sequence[Message], params: GenerationParams) -> RequestStream:
        """Answer a conversation. Raises as ``generate`` does."""
        if self._tokenizer.chat_template is None:
            raise InvalidRequestError("this model has no chat template: use /v1/completions", "messages")
        text = self._tokenizer.chat_template.render(messages)
        return await self._submit([await self._tokenise(text, "messages", special=False)], params, "messages")

    async def generate(self, prompts: Sequence[Prompt], params: GenerationParams) -> RequestStream:
        """Continue each prompt ``params.n`` times; choice ``i * n + j`` is sample j of prompt i.

        Raises:
            InvalidRequestError: a prompt is too long; tokens are named that the model does not have; a grammar is none;
                the engines cannot do what is asked for; embeddings are not this model's.
            OverloadedError: no engine can take it now, or too many embeddings are held already.
            EngineDeadError: the client is closed.
        """
        return await self._submit(await self._encode(prompts, "prompt"), params, "prompt")

    async def embed(
        self,
        prompts: Sequence[str | list[int]],
        *,
        dimensions: int | None = None,
        data_parallel_rank: int | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Work out one vector per prompt; choice i ends with that of prompt i in ``pooled``, and has no text.

        dimensions: numbers that are wanted of each; checked here, cut by the reader (``embeds.shorten``).
        data_parallel_rank, priority: as in ``GenerationParams``.

        Raises:
            InvalidRequestError: a prompt is too long, the model gives no vectors, or none so long.
            OverloadedError, EngineDeadError: as ``generate``.
        """
        created_at = time.monotonic()
        params = GenerationParams(data_parallel_rank=data_parallel_rank, priority=priority)
        self._learn_limits()
        self._limits.check_vectors(dimensions)
        check_scheduling(params)
        requests = []
        for token_ids in await self._encode(prompts, "input"):
            assert isinstance(token_ids, list), "vectors are made of tokens"
            self._limits.check_tokens(token_ids, "input")
            self._limits.check_length(len(token_ids), "input")
            name = self._client.request_ids.draw(), 0
            request = self._add_request(name, token_ids, SamplingParams(max_tokens=0), params)
            request.pooling = PoolingParams()
            requests.append(request)
        return await self._open(requests, params, created_at)

    async def abort(self, stream: RequestStream) -> None:
        """End what is open of a stream with reason ``abort`` and free its place in the engines; idempotent."""
        await self._abort_on_engines(self._processor.finish(stream, "abort", time.monotonic()))

    async def abort_all(self) -> None:
        """Abort every open stream."""
        for stream in self._processor.open_streams():
            await self.abort(stream)

    # --- submission -------------------------------------------------------------------------------------------------

    async def _encode(self, prompts: Sequence[Prompt], field: str) -> list[list[int] | Tensor]:
        encoded: list[list[int] | Tensor] = []
        for prompt in prompts:
            encoded.append(await self._tokenise(prompt, field, special=True) if isinstance(prompt, str) else prompt)
            if len(encoded) % _PROMPTS_PER_TURN == 0:
                await asyncio.sleep(0)  # a thousand prompts must not hold the loop: others get their turn
        return encoded

    async def _tokenise(self, text: str, field: str, *, special: bool) -> list[int]:
        """Return the token ids; refuse a text that is too long whatever its tokens, before that costs anything."""
        if len(text) < _INLINE_CHARACTERS:
            return self._tokenizer.encode(text, special)
        self._learn_limits()
        limit = self._limits.max_model_len
        if len(text) > limit * self._tokenizer.longest_token:
            raise InvalidRequestError(
                f"{field}: a text of {len(text)} characters has more than the {limit} tokens of this model's context",
                field,
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._tokenizer.encode, text, special)

    async def _submit(
        self, prompts: Sequence[list[int] | Tensor], params: GenerationParams, field: str
    ) -> RequestStream:
        created_at = time.monotonic()
        self._learn_limits()
        self._limits.check_tokens(params.stop_token_ids, "stop_token_ids")
        self._limits.check_tokens(params.allowed_token_ids, "allowed_token_ids")
        self._limits.check_tokens(list(params.logit_bias), "logit_bias")
        check_features(params, self._limits.features)
        check_scheduling(params)
        rules = await self._rules.encode(params)
        requests = [request for prompt in prompts for request in self._requests_of(prompt, params, rules, field)]
        return await self._open(requests, params, created_at)

    async def _open(self, requests: list[AddRequest], params: GenerationParams, created_at: float) -> RequestStream:
        stream = RequestStream(
            [self._choice(index, request, params) for index, request in enumerate(requests)], created_at
        )
        self._processor.register(stream)  # before it is sent: its first output may come while the sending waits
        await self._send(stream, requests, params.data_parallel_rank)
        for request in requests:
            if request.sample_index == 0:  # samples of one prompt share its tokens
                self._stats.on_accepted(len(request.prompt_token_ids))
        return stream

    async def _send(self, stream: RequestStream, requests: list[AddRequest], rank: int | None) -> None:
        try:
            for choice, request in zip(stream.choices, requests, strict=True):
                engine_id = await self._client.add_request_async(request, rank)
                choice.rank = engine_id.rank
                self._stats.on_picked(engine_id.rank)
        except BaseException:  # also when cancelled: siblings that are on their way must not run on
            await self._abort_on_engines(self._processor.forget(stream))
            raise

    def _requests_of(
        self, prompt: list[int] | Tensor, params: GenerationParams, rules: EncodedRules, field: str
    ) -> list[AddRequest]:
        embeds = prompt if isinstance(prompt, Tensor) else None
        token_ids = self._placeholders(prompt, params) if isinstance(prompt, Tensor) else prompt
        self._limits.check_tokens(token_ids, field)
        room = self._limits.max_model_len
        sampling = params.for_prompt(len(token_ids), room, self._rng.getrandbits(63), field, rules)
        request_id = self._client.request_ids.draw()
        if embeds is not None:
            self._embeds_budget.hold(embeds)
        names = [(request_id, sample) for sample in range(params.n)]
        return [self._add_request(name, token_ids, sampling, params, embeds) for name in names]

    def _placeholders(self, embeds: Tensor, params: GenerationParams) -> list[int]:
        """Return what stands where the tokens of a prompt of embeddings would."""
        self._limits.check_embeds(embeds, params.n)
        check_embeds_params(params)
        return [0] * embeds.shape[0]

    def _add_request(
        self,
        name: SequenceName,
        token_ids: list[int],
        sampling: SamplingParams,
        params: GenerationParams,
        embeds: Tensor | None = None,
    ) -> AddRequest:
        return AddRequest(
            client_id=self._client.client_id,
            channel_seq=0,  # stamped by the client when it sends
            request_id=name[0],
            sample_index=name[1],
            attempt=0,
            prompt_token_ids=token_ids,
            output_token_ids=[],
            sampling=sampling,
            priority=params.priority,
            cache_salt=params.cache_salt,
            prompt_embeds=embeds,
        )

    def _choice(self, index: int, request: AddRequest, params: GenerationParams) -> Choice:
        return Choice(
            index=index,
            request_id=request.request_id,
            sample_index=request.sample_index,
            num_prompt_tokens=len(request.prompt_token_ids),
            detokenizer=Detokenizer(self._tokenizer, request.prompt_token_ids if request.prompt_embeds is None else ()),
            stop=StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None,
            token_ids=[] if self._keep_token_ids else None,
            echo=self._tokenizer.decode(request.prompt_token_ids) if params.echo else "",
            logprobs=self._choice_logprobs(request, params),
        )

    def _choice_logprobs(self, request: AddRequest, params: GenerationParams) -> ChoiceLogprobs | None:
        if params.logprobs is None and params.prompt_logprobs is None:
            return None
        return ChoiceLogprobs(
            self._texts,
            request.prompt_token_ids,
            outputs=params.logprobs,
            prompt=params.prompt_logprobs,
            echo=Detokenizer(self._tokenizer) if params.echo else None,
        )

    def _learn_limits(self) -> None:
        if not self._limits.max_model_len:
            self._limits.learn(self._client.engine_views())

    # --- outputs ----------------------------------------------------------------------------------------------------

    async def _read_outputs(self) -> None:
        try:
            await self._client.consume_outputs(self._on_outputs)
        except EngineDeadError as error:
            logger.warning("the connection to the engines is closed: %s", error)
            self._processor.fail_all(error, time.monotonic())
        except Exception as error:  # whatever it is, open streams must get their end
            logger.exception("the output loop failed")
            self._processor.fail_all(EngineDeadError(f"the output loop failed: {error}"), time.monotonic())

    def _on_outputs(self, batch: EngineCoreOutputs) -> None:
        orphans = self._processor.process(batch, time.monotonic())
        if orphans:
            task = asyncio.create_task(self._abort_orphans(orphans), name="llm-abort")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort_orphans(self, names: Sequence[SequenceName]) -> None:
        with contextlib.suppress(EngineDeadError):  # nobody is left to abort them on
            await self._abort_on_engines(names)

    async def _abort_on_engines(self, names: Iterable[SequenceName]) -> None:
        for request_id, sample_index in names:
            await self._client.abort_requests_async([request_id], sample_index)
