"""Shoal's own EngineCore: the scheduler decides, a runner runs. Serves the torch and the sim runner alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from engine.config.engine_config import SchedulerConfig
from engine.core.validation import find_fault
from engine.interfaces.engine_core import OnProgress, Runner, RunnerLimits
from engine.interfaces.plan import Sample, SequenceKey, SequenceState, StepPlan
from engine.scheduler.scheduler import Scheduler
from engine.wire.errors import UnknownMethodError
from engine.wire.ids import ClientId
from engine.wire.load import Load
from engine.wire.messages import AddRequest, EngineCoreOutput


class NativeCore:
    """One rank's engine over any runner; implements ``engine.interfaces.engine_core.EngineCore``.

    A fault of one request ends that request alone. What ``Runner.run`` raises is a fault of the step and propagates:
    the runner's state is unknown then, and the process must die with last words.
    """

    def __init__(self, config: SchedulerConfig, runner: Runner) -> None:
        self._runner = runner
        self._scheduler = Scheduler(config, runner.limits)
        self._utilities: dict[str, Callable[..., Any]] = {
            "collective_rpc": self._collective_rpc,
            "echo": _echo,
            "get_load": self._get_load,
            "reset_prefix_cache": self._scheduler.reset_prefix_cache,
            "statistics": self._statistics,
        }

    @property
    def limits(self) -> RunnerLimits:
        """Return what the loaded model can do, with ``max_model_len`` bounded by what the KV cache holds."""
        return replace(self._runner.limits, max_model_len=self._scheduler.max_len)

    def add_request(self, request: AddRequest, received_at: float) -> None:
        """Queue one sequence; one that cannot be served ends with an ERROR output of the next step."""
        sequence = _to_sequence(request, received_at)
        fault = find_fault(request, self._runner.limits, self._scheduler.max_len)
        if fault is None:
            self._scheduler.add(sequence)
        else:
            self._scheduler.refuse(sequence, fault)

    def abort_requests(self, keys: Sequence[tuple[SequenceKey, int]]) -> None:
        """End sequences with ABORT, each named by (key, attempt); unknown ones are left alone."""
        for key, attempt in keys:
            self._scheduler.abort(key, attempt)

    def give_back_all(self) -> None:
        """Give every sequence back with REROUTE."""
        self._scheduler.give_back_all()

    def free_client(self, client_id: ClientId) -> None:
        """Free every sequence of a client that has gone; nothing more is said to it."""
        self._scheduler.free_client(client_id)

    def stall_client(self, client_id: ClientId) -> None:
        """Give the sequences of a client that takes nothing no more compute, slots and blocks."""
        self._scheduler.stall_client(client_id)

    def resume_client(self, client_id: ClientId) -> None:
        """Let the sequences of a client that was stalled go on."""
        self._scheduler.resume_client(client_id)

    def has_work(self) -> bool:
        """Tell whether the next step has anything to do or to say."""
        return self._scheduler.has_work()

    def step(
        self, now: float, on_planned: Callable[[], object] | None = None
    ) -> Mapping[ClientId, list[EngineCoreOutput]]:
        """Plan, run and commit one step; a plan without chunks only delivers what there is to say.

        on_planned: called between plan and run, when ``load`` shows who runs.
        """
        plan = self.plan()
        if on_planned is not None:
            on_planned()
        return self.apply(plan, self._runner.run(plan) if plan.chunks else (), now)

    def plan(self) -> StepPlan:
        """Decide the next step without running it; whoever runs it in company ends it with ``apply``, or drops it."""
        return self._scheduler.plan()

    def apply(self, plan: StepPlan, samples: Sequence[Sample], now: float) -> Mapping[ClientId, list[EngineCoreOutput]]:
        """Commit the plan made last and return what to tell each client."""
        return self._scheduler.apply(plan, samples, now)

    def flush(self) -> Mapping[ClientId, list[EngineCoreOutput]]:
        """Return what there is to tell each client, and run nothing."""
        return self._scheduler.flush()

    def hold_new_requests(self) -> None:
        """Let sequences that come from now on wait until ``release_held_requests``."""
        self._scheduler.hold_new_requests()

    def release_held_requests(self) -> None:
        """Let those that were held back run like the others."""
        self._scheduler.release_held_requests()

    def has_earlier(self) -> bool:
        """Tell whether there are sequences that are not held back."""
        return self._scheduler.has_earlier()

    def abort_earlier(self) -> None:
        """End every sequence that is not held back with ABORT."""
        self._scheduler.abort_earlier()

    def sleep(self, level: int) -> None:
        """Give the device's memory back; running sequences wait, to be computed anew."""
        self._scheduler.preempt_all()
        self._runner.sleep(level)

    def wake_up(self, on_progress: OnProgress) -> None:
        """Take the memory again and load what was dropped."""
        self._runner.wake_up(on_progress)

    def load(self) -> Load:
        """Return the counters as they are now."""
        return self._scheduler.load()

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
        """Run one of the other methods. The deadline is the caller's to keep: nothing here can be interrupted."""
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
    """Return the scheduler's view; a resumed request is a preempted sequence that starts here."""
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
