"""The native core: Shoal's own EngineCore, a scheduler that decides over a runner that computes (torch or sim)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from engine.config.engine_config import SchedulerConfig
from engine.core.validation import find_fault
from engine.interfaces.engine_core import OnProgress, OutputsByClient, Runner, RunnerLimits
from engine.interfaces.plan import SequenceKey, SequenceState
from engine.scheduler.scheduler import Scheduler
from engine.wire.errors import UnknownMethodError
from engine.wire.messages import AddRequest


class NativeCore:
    """One rank's engine over any runner; implements ``engine.interfaces.engine_core.EngineCore``.

    A fault of one request ends that request alone. What ``Runner.run`` raises is a fault of the step and propagates:
    the runner's state is unknown then, and the process must die with last words.

    scheduler: which sequences there are and which run. Steps taken apart, as in a lockstep group, are its ``plan`` and
    ``apply``.
    """

    def __init__(self, config: SchedulerConfig, runner: Runner) -> None:
        self.scheduler = Scheduler(config, runner.limits)
        self._runner = runner
        # Asked around every step: bound here, so that no call of our own lies between.
        self.has_work = self.scheduler.has_work
        self.load = self.scheduler.load
        self._utilities: dict[str, Callable[..., Any]] = {
            "collective_rpc": self._collective_rpc,
            "echo": _echo,
            "get_load": self._get_load,
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "statistics": self._statistics,
        }

    @property
    def limits(self) -> RunnerLimits:
        """Return what the loaded model can do, with ``max_model_len`` bounded by what the KV cache holds."""
        return replace(self._runner.limits, max_model_len=self.scheduler.max_len)

    def add_request(self, request: AddRequest, received_at: float) -> None:
        """Queue one sequence; one that cannot be served ends with an ERROR output of the next step."""
        sequence = _to_sequence(request, received_at)
        fault = find_fault(request, self._runner.limits, self.scheduler.max_len)
        if fault is None:
            self.scheduler.add(sequence)
        else:
            self.scheduler.refuse(sequence, fault)

    def abort_requests(self, keys: Sequence[tuple[SequenceKey, int]]) -> None:
        """End sequences with ABORT, each named by (key, attempt); unknown ones are ignored."""
        for key, attempt in keys:
            self.scheduler.abort(key, attempt)

    def step(self, now: float, on_planned: Callable[[], object] | None = None) -> OutputsByClient:
        """Plan, run and commit one step; a plan without chunks only delivers the outputs that wait.

        on_planned: called between plan and run, when ``load`` counts the planned sequences as running.
        """
        plan = self.scheduler.plan()
        if on_planned is not None:
            on_planned()
        samples = self._runner.run(plan) if plan.chunks else ()
        return self.scheduler.apply(plan, samples, now)

    def sleep(self, level: int) -> None:
        """Give the device's memory back; running sequences wait, to be computed anew."""
        self.scheduler.preempt_all()  # before the blocks lose what they hold, so that none is found in the cache later
        self._runner.sleep(level)

    def wake_up(self, on_progress: OnProgress) -> None:
        """Take the memory again and load what was dropped."""
        self._runner.wake_up(on_progress)

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Run a registered utility method.

        Raises:
            UnknownMethodError: no such method; names those there are.
        """
        return _find(self._utilities, method)(*args)

    def close(self) -> None:
        """Free the device."""
        self._runner.close()

    def _collective_rpc(
        self, method: str, _timeout_s: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        # The deadline is the caller's to keep: nothing here can be interrupted. Not itself: that would never end.
        callable_by_name = {name: utility for name, utility in self._utilities.items() if name != "collective_rpc"}
        return _find(callable_by_name, method)(*args, **kwargs)

    def _get_load(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self.load())

    def _statistics(self) -> dict[str, Any]:
        limits = self.limits
        return self._get_load() | {
            "num_kv_tokens": limits.num_blocks * limits.block_size,
            "max_model_len": limits.max_model_len,
        }


def _echo(value: Any) -> Any:
    return value


def _find(methods: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    method = methods.get(name)
    if method is None:
        raise UnknownMethodError(name, sorted(methods))
    return method


def _to_sequence(request: AddRequest, received_at: float) -> SequenceState:
    # A request with output tokens is resumed here; to the scheduler it is a preempted sequence, all tokens known.
    return SequenceState(
        client_id=request.client_id,
        request_id=request.request_id,
        sample_index=request.sample_index,
        attempt=request.attempt,
        sampling=request.sampling,
        token_ids=request.prompt_token_ids + request.output_token_ids,
        num_prompt_tokens=len(request.prompt_token_ids),
        received_at=received_at,
        priority=request.priority,
        num_resumed=len(request.output_token_ids),
        cache_salt=request.cache_salt,
        prompt_embeds=request.prompt_embeds,
        pooling=request.pooling,
    )
