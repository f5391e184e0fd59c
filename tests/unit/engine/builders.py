"""Small sequences, requests and limits for the engine's unit tests."""

from typing import Any

from engine.config.engine_config import SchedulerConfig
from engine.interfaces.engine_core import RunnerLimits
from engine.interfaces.plan import Sample, SequenceState, StepPlan
from engine.scheduler.scheduler import Scheduler
from engine.wire.ids import ClientId
from engine.wire.messages import AddRequest, EngineCoreOutput
from engine.wire.sampling import SamplingParams

CLIENT = ClientId(0, 1)
OTHER_CLIENT = ClientId(1, 1)
EOS = 2


def make_limits(**changes: Any) -> RunnerLimits:
    values: dict[str, Any] = {
        "max_model_len": 64,
        "vocab_size": 256,
        "num_blocks": 64,
        "block_size": 4,
        "eos_token_ids": frozenset({EOS}),
        "device": "cpu",
        "dtype": "none",
    }
    return RunnerLimits(**(values | changes))


def make_scheduler(
    num_seqs: int = 8, num_tokens: int = 64, *, enable_prefix_caching: bool = True, **limits: Any
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, enable_prefix_caching=enable_prefix_caching
    )
    return Scheduler(config, make_limits(**limits))


def make_sequence(
    request_id: int,
    num_prompt_tokens: int = 4,
    *,
    prompt: tuple[int, ...] | None = None,
    output_token_ids: tuple[int, ...] = (),
    client_id: ClientId = CLIENT,
    sample_index: int = 0,
    attempt: int = 0,
    priority: int = 0,
    received_at: float = 0.0,
    cache_salt: str | None = None,
    **sampling: Any,
) -> SequenceState:
    if prompt is None:
        prompt = (100 + request_id,) * num_prompt_tokens
    return SequenceState(
        client_id=client_id,
        request_id=request_id,
        sample_index=sample_index,
        attempt=attempt,
        sampling=SamplingParams(**({"max_tokens": 4} | sampling)),
        token_ids=[*prompt, *output_token_ids],
        num_prompt_tokens=len(prompt),
        received_at=received_at,
        priority=priority,
        num_resumed=len(output_token_ids),
        cache_salt=cache_salt,
    )


def make_request(request_id: int = 1, prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> AddRequest:
    output_token_ids = list(sampling.pop("output_token_ids", ()))
    params = SamplingParams(**({"max_tokens": 4} | sampling))
    return AddRequest(CLIENT, request_id, request_id, 0, 0, list(prompt), output_token_ids, params)


def sample_for(plan: StepPlan, token_id: int = 50) -> list[Sample]:
    return [Sample(token_id) for chunk in plan.chunks if chunk.samples]


def run_step(
    scheduler: Scheduler, token_id: int = 50, now: float = 0.0, plan: StepPlan | None = None
) -> list[EngineCoreOutput]:
    """Run one step, planned already or not; whoever samples gets ``token_id``; return all outputs."""
    if plan is None:
        plan = scheduler.plan()
    outputs = scheduler.apply(plan, sample_for(plan, token_id), now)
    return [output for client_outputs in outputs.values() for output in client_outputs]
