"""The two sides of the engine benchmark, Shoal's core and transformers itself, and the loads that both serve."""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.core.native import NativeCore
from engine.model.loader import load_model
from engine.runner import torch_runner
from engine.runner.sampler import Sampler
from engine.runner.torch_runner import TorchRunner
from engine.scheduler.scheduler import Scheduler
from engine.wire.ids import ClientId
from engine.wire.messages import AddRequest, FinishReason
from engine.wire.sampling import SamplingParams

VOCAB_SIZE = 49_152
_FIRST_WORD = 100  # below are the special tokens


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all arrive at once. prompts: token ids. num_outputs: tokens wanted of each, end tokens or not."""

    prompts: list[list[int]]
    num_outputs: list[int]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a load: seconds of wall and of CPU, all threads together, for the output tokens that were wanted."""

    wall_s: float
    cpu_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Return wanted output tokens per second of wall."""
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Return wanted output tokens per second of CPU."""
        return self.num_tokens / self.cpu_s


def equal_load(num_requests: int, num_prompt_tokens: int, num_output_tokens: int) -> Load:
    """Return requests of one length, which a static batch serves without any waste."""
    rng = random.Random(num_requests)
    prompts = [_prompt(rng, num_prompt_tokens) for _ in range(num_requests)]
    return Load(prompts, [num_output_tokens] * num_requests)


def mixed_load(num_requests: int, max_prompt_tokens: int, max_output_tokens: int) -> Load:
    """Return requests of 16 to so many tokens in and out, evenly distributed and independent."""
    rng = random.Random(7)
    prompts = [_prompt(rng, rng.randint(16, max_prompt_tokens)) for _ in range(num_requests)]
    return Load(prompts, [rng.randint(16, max_output_tokens) for _ in prompts])


def measure(run: Callable[[Load], None], load: Load) -> Cost:
    """Serve a load and return its cost."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    run(load)
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s, sum(load.num_outputs))


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(_FIRST_WORD, VOCAB_SIZE) for _ in range(num_tokens)]


_CLIENT = ClientId(0, 1)
_MAX_LEN = 1024

# Part of a step -> what is called for it.
_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "scheduler": ((Scheduler, "plan"),),
    "input preparation": ((torch_runner, "make_batch"), (Sampler, "prepare")),
    "forward": ((torch_runner, "_forward"),),
    "sampling": ((Sampler, "sample"),),
    "output": ((Scheduler, "apply"),),
}


class ShoalEngine:
    """A native core with a real model; greedy, no reuse of beginnings, so that every round does the same work."""

    def __init__(self, model: str, dtype: str, num_threads: int) -> None:
        scheduler = SchedulerConfig(enable_prefix_caching=False)
        config = ModelConfig(model=model, dtype=dtype, num_threads=num_threads, max_model_len=_MAX_LEN)
        self._core = NativeCore(scheduler, TorchRunner(config, scheduler, lambda what, share: None))

    def serve(self, load: Load) -> None:
        """Answer all requests, arriving at once."""
        self._add(load)
        while self._core.has_work():
            self._step()

    def split(self, load: Load) -> dict[str, float]:
        """Serve requests of one length and return the seconds of the steps in which all decode, per part and ``step``.

        What no part accounts for, as the clearing of blocks, is in ``step`` alone.
        """
        seconds: defaultdict[str, float] = defaultdict(float)
        self._add(load)
        num_tokens = 0
        while num_tokens < len(load.prompts):
            num_tokens += self._step()
        with _timing_parts(seconds):
            for _ in range(load.num_outputs[0] - 2):
                started_at = time.perf_counter()
                self._step()
                seconds["step"] += time.perf_counter() - started_at
        while self._core.has_work():
            self._step()
        return dict(seconds)

    def close(self) -> None:
        """Free the model."""
        self._core.close()

    def _add(self, load: Load) -> None:
        for index, (prompt, num_output) in enumerate(zip(load.prompts, load.num_outputs, strict=True)):
            sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
            request = AddRequest(
                client_id=_CLIENT,
                channel_seq=index + 1,
                request_id=index + 1,
                sample_index=0,
                attempt=0,
                prompt_token_ids=prompt,
                output_token_ids=[],
                sampling=sampling,
            )
            self._core.add_request(request, received_at=0.0)

    def _step(self) -> int:
        """Run a step; return how many tokens came out."""
        outputs = self._core.step(now=0.0).get(_CLIENT, [])
        assert all(output.finish_reason in (None, FinishReason.LENGTH) for output in outputs), outputs
        return len(outputs)


@contextmanager
def _timing_parts(seconds: defaultdict[str, float]) -> Iterator[None]:
    with ExitStack() as stack:
        for part, calls in _PARTS.items():
            for owner, name in calls:
                stack.enter_context(patch.object(owner, name, _timed(getattr(owner, name), part, seconds)))
        yield


def _timed(call: Callable[..., Any], part: str, seconds: defaultdict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started_at = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - started_at

    return timed


PADDED_BATCH = 32

_PAGE_TOKENS = 32
_STEP_TOKENS = 512
_RESULT_TIMEOUT_S = 600.0


class TransformersModel:
    """A model as ``from_pretrained`` gives it, with PyTorch's attention."""

    def __init__(self, model: str, dtype: str, num_threads: int) -> None:
        config = ModelConfig(model=model, dtype=dtype, num_threads=num_threads)
        self._model: Any = load_model(config, "sdpa", lambda what, share: None).model
        torch.set_num_threads(num_threads)

    def loop_static_batch(self, load: Load) -> None:
        """Answer requests of one length in one batch: forward, greedy choice, forward; nothing between them."""
        cache = DynamicCache(config=self._model.config)
        token_ids = torch.tensor(load.prompts)
        with torch.inference_mode():
            for _ in range(load.num_outputs[0]):
                output = self._model(input_ids=token_ids, cache=cache, use_cache=True, logits_to_keep=1)
                token_ids = output.logits[:, -1].float().argmax(dim=-1)[:, None]
                token_ids.tolist()  # a server has to read them too

    def generate_padded(self, load: Load) -> None:
        """Answer requests with ``generate``, in padded batches in the order of arrival."""
        for first in range(0, len(load.prompts), PADDED_BATCH):
            prompts = load.prompts[first : first + PADDED_BATCH]
            longest = max(map(len, prompts))
            padding = [longest - len(prompt) for prompt in prompts]
            num_new = max(load.num_outputs[first : first + PADDED_BATCH])
            self._model.generate(
                torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
                attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
            )

    def generate_continuously(self, load: Load) -> None:
        """Answer requests with the library's own continuous batching."""
        longest = max(len(prompt) + num for prompt, num in zip(load.prompts, load.num_outputs, strict=True))
        config = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=len(load.prompts) * -(-longest // _PAGE_TOKENS),  # no request waits for memory
            max_batch_tokens=_STEP_TOKENS,
            allow_block_sharing=False,
        )
        generation: Any = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            manager = self._model.init_continuous_batching(generation, config)
            manager.start()
        try:
            for prompt, num_output in zip(load.prompts, load.num_outputs, strict=True):
                manager.add_request(prompt, max_new_tokens=num_output, eos_token_id=-1)
            results = [manager.get_result(timeout=_RESULT_TIMEOUT_S) for _ in load.prompts]
        finally:
            manager.stop(block=True)
        assert all(result is not None and result.error is None for result in results), results
        assert sum(len(result.generated_tokens) for result in results) == sum(load.num_outputs)
