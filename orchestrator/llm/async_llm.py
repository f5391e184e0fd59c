"""The text facade over the engines: prompts in, streams of text out. Text stops here; below travel only ids."""

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from client.core_client import GroupClient
from engine.wire.errors import EngineDeadError, InvalidRequestError, OverloadedError
from engine.wire.messages import AddRequest
from engine.wire.sampling import SamplingParams
from lb.views import EngineView
from metrics.stats import ServingStats
from orchestrator.llm.chat_template import Message
from orchestrator.llm.detokenizer import Detokenizer
from orchestrator.llm.outputs import OutputProcessor, SequenceName
from orchestrator.llm.params import EncodedRules, GenerationParams
from orchestrator.llm.rules import RuleEncoder, check_features
from orchestrator.llm.scores import ChoiceScores
from orchestrator.llm.stop import StopChecker
from orchestrator.llm.stream import Choice, RequestStream
from orchestrator.llm.token_texts import TokenTexts
from orchestrator.llm.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

Prompt = str | list[int]

_INLINE_CHARACTERS = 2_000
"""Shorter texts are tokenised on the event loop: a trip to a thread costs as much as 100 tokens."""

_NUM_TOKENIZER_THREADS = 2


class AsyncLLM:
    """Generates text on the engines behind a client. Everything runs on one event loop.

    One task reads the client's outputs. Every stream that ``generate`` or ``chat`` returned ends exactly once, whatever
    happens: by its engine, by ``abort``, by the death of the line, by ``aclose``.
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
        """Wrap a client; ``aclose`` leaves it to whoever made it.

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
        self._max_model_len = 0
        self._vocab_size = 0
        self._features: frozenset[str] = frozenset()
        self._output_task: asyncio.Task[None] | None = None

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

    @property
    def num_open(self) -> int:
        """Return how many choices are being generated."""
        return self._processor.num_open

    def engine_views(self) -> list[EngineView]:
        """Return what the client knows of each engine."""
        return self._client.engine_views()

    def statistics(self) -> dict[str, int]:
        """Return counters of this facade and of its client."""
        own = {"open_choices": self._processor.num_open, "outputs_for_unknown": self._processor.num_unknown}
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
                the engines cannot do what is asked for.
            OverloadedError: no engine can take it now.
            EngineDeadError: the line to the engines is closed.
        """
        token_ids = [
            await self._tokenise(prompt, "prompt", special=True) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        return await self._submit(token_ids, params, "prompt")

    async def abort(self, stream: RequestStream) -> None:
        """End what is open of a stream with reason ``abort`` and free its place in the engines; idempotent."""
        await self._abort_on_engines(self._processor.finish(stream, "abort", time.monotonic()))

    async def abort_all(self) -> None:
        """Abort every open stream."""
        for stream in self._processor.open_streams():
            await self.abort(stream)

    # --- submission -------------------------------------------------------------------------------------------------

    async def _tokenise(self, text: str, field: str, *, special: bool) -> list[int]:
        """Return the token ids; refuse a text that is too long whatever its tokens, before that costs anything."""
        if len(text) < _INLINE_CHARACTERS:
            return self._tokenizer.encode(text, special)
        self._learn_limits()
        if len(text) > self._max_model_len * self._tokenizer.longest_token:
            raise InvalidRequestError(
                f"{field}: a text of {len(text)} characters has more than the {self._max_model_len} tokens of this "
                "model's context",
                field,
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._tokenizer.encode, text, special)

    async def _submit(self, prompts: Sequence[list[int]], params: GenerationParams, field: str) -> RequestStream:
        created_at = time.monotonic()
        self._learn_limits()
        self._check_vocabulary(params.stop_token_ids, "stop_token_ids")
        self._check_vocabulary(params.allowed_token_ids, "allowed_token_ids")
        self._check_vocabulary(list(params.logit_bias), "logit_bias")
        check_features(params, self._features)
        rules = await self._rules.encode(params)
        requests = [request for ids in prompts for request in self._requests_of_prompt(ids, params, rules, field)]
        stream = RequestStream(
            [self._choice(index, request, params) for index, request in enumerate(requests)], created_at
        )
        self._processor.register(stream)
        await self._send(stream, requests, params.data_parallel_rank)
        for token_ids in prompts:
            self._stats.on_accepted(len(token_ids))
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

    def _requests_of_prompt(
        self, token_ids: list[int], params: GenerationParams, rules: EncodedRules, field: str
    ) -> list[AddRequest]:
        self._check_vocabulary(token_ids, field)
        sampling = params.for_prompt(len(token_ids), self._max_model_len, self._rng.getrandbits(63), field, rules)
        request_id = self._client.request_ids.draw()
        return [self._add_request(request_id, sample, token_ids, sampling) for sample in range(params.n)]

    def _add_request(
        self, request_id: int, sample_index: int, token_ids: list[int], sampling: SamplingParams
    ) -> AddRequest:
        return AddRequest(
            client_id=self._client.client_id,
            line_seq=0,
            request_id=request_id,
            sample_index=sample_index,
            attempt=0,
            cost=1,
            prompt_token_ids=token_ids,
            output_token_ids=[],
            sampling=sampling,
        )

    def _choice(self, index: int, request: AddRequest, params: GenerationParams) -> Choice:
        return Choice(
            index=index,
            request_id=request.request_id,
            sample_index=request.sample_index,
            num_prompt_tokens=len(request.prompt_token_ids),
            detokenizer=Detokenizer(self._tokenizer, request.prompt_token_ids),
            stop=StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None,
            token_ids=[] if self._keep_token_ids else None,
            echo=self._tokenizer.decode(request.prompt_token_ids) if params.echo else "",
            scores=self._scores(request, params),
        )

    def _scores(self, request: AddRequest, params: GenerationParams) -> ChoiceScores | None:
        if params.logprobs is None and params.prompt_logprobs is None:
            return None
        return ChoiceScores(
            self._texts,
            request.prompt_token_ids,
            outputs=params.logprobs,
            prompt=params.prompt_logprobs,
            echo=Detokenizer(self._tokenizer) if params.echo else None,
        )

    def _learn_limits(self) -> None:
        """Take the model's limits from the first engine that is ready: they are the same for the whole deployment."""
        if self._max_model_len:
            return
        ready = next((view.ready for view in self._client.engine_views() if view.ready is not None), None)
        if ready is None:
            raise OverloadedError("no engine is ready yet")
        self._max_model_len, self._vocab_size = ready.max_model_len, ready.vocab_size
        self._features = frozenset(ready.features)

    def _check_vocabulary(self, token_ids: Sequence[int], field: str) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise InvalidRequestError(f"token ids must be in [0, {self._vocab_size})", field)

    # --- outputs ----------------------------------------------------------------------------------------------------

    async def _read_outputs(self) -> None:
        try:
            while True:
                batch = await self._client.get_output_async()
                orphans = self._processor.process(batch, time.monotonic())
                if orphans:
                    await self._abort_on_engines(orphans)
        except EngineDeadError as error:
            logger.warning("the line to the engines is closed: %s", error)
            self._processor.fail_all(error, time.monotonic())
        except Exception as error:  # whatever it is, open streams must get their end
            logger.exception("the output loop failed")
            self._processor.fail_all(EngineDeadError(f"the output loop failed: {error}"), time.monotonic())

    async def _abort_on_engines(self, names: Iterable[SequenceName]) -> None:
        for request_id, sample_index in names:
            await self._client.abort_requests_async([request_id], sample_index)
