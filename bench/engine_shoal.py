"""Shoal's side of the engine benchmark: the core in this process, without its sockets and threads."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from bench.engine_loads import Load
from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.core.native import NativeCore
from engine.runner import torch_runner
from engine.runner.sampler import Sampler
from engine.runner.torch_runner import TorchRunner
from engine.scheduler.scheduler import Scheduler
from engine.wire.ids import ClientId
from engine.wire.messages import AddRequest, FinishReason
from engine.wire.sampling import SamplingParams

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
