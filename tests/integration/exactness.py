"""Runs of prompts through the real core under hard conditions, and their comparison with transformers' own tokens."""

import itertools
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.config.engine_config import SchedulerConfig
from engine.core.native import NativeCore
from engine.interfaces.engine_core import OnProgress, Runner, RunnerLimits
from engine.interfaces.plan import Sample, StepPlan
from engine.wire.ids import ClientId
from engine.wire.load import Load
from engine.wire.messages import AddRequest, FinishReason
from engine.wire.sampling import SamplingParams
from engine.wire.tensors import Tensor
from tests.unit.runner.families import without_bars

CLIENT = ClientId(0, 1)
_LOGGER = logging.getLogger(__name__)
_NOISE = 1e-4
"""Two best logits closer than this share of their spread may change places with the order of a summation in float32."""


class SmallPool:
    """A runner of which only the first blocks are used, so that sequences push each other out."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self._runner = runner
        self._limits = replace(runner.limits, num_blocks=num_blocks)

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def run(self, plan: StepPlan) -> Sequence[Sample]:
        return self._runner.run(plan)

    def sleep(self, level: int) -> None:
        self._runner.sleep(level)

    def wake_up(self, on_progress: OnProgress) -> None:
        self._runner.wake_up(on_progress)

    def close(self) -> None:
        """Leave the runner to its owner."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The output tokens of each prompt, and the counters when all had ended."""

    tokens: list[list[int]]
    load: Load


def answer(
    runner: Runner,
    scheduler: SchedulerConfig,
    prompts: Sequence[list[int]],
    num_tokens: int,
    seed: int,
    embeds: Sequence[Tensor] | None = None,
) -> Generated:
    """Return ``num_tokens`` of each prompt from a new core; how many requests arrive before a step is random.

    embeds: what stands in for the embeddings of each prompt.
    """
    rng = random.Random(seed)
    core = NativeCore(scheduler, runner)
    answers: list[list[int]] = [[] for _ in prompts]
    arriving = iter(range(len(prompts)))
    num_finished = 0
    while num_finished < len(prompts):
        for index in itertools.islice(arriving, rng.randrange(4)):
            request = make_request(index, prompts[index], num_tokens)
            request.prompt_embeds = None if embeds is None else embeds[index]
            core.add_request(request, received_at=0.0)
        for output in core.step(now=0.0).get(CLIENT, []):
            assert output.error is None, output.error
            answers[output.request_id].extend(output.new_token_ids)
            num_finished += output.finish_reason is FinishReason.LENGTH
    return Generated(answers, core.load())


def assert_equal(found: list[list[int]], expected: list[list[int]], prompts: list[list[int]], folder: Path) -> None:
    """Compare answers; they may diverge only where the model's two best tokens are as good as equal.

    Every such place is logged.
    """
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        if ours == theirs:
            continue
        position = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        margin = _margin(folder, [*prompt, *theirs[:position]])
        _LOGGER.warning("diverged at token %d after a prompt of %d, margin %.1e", position, len(prompt), margin)
        assert margin < _NOISE, f"{ours} is not {theirs}: they diverge at {position}, margin {margin:.1e}"


def _margin(folder: Path, tokens: list[int]) -> float:
    with without_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return float((first - second) / logits.std())


def make_request(index: int, prompt: list[int], num_tokens: int) -> AddRequest:
    return AddRequest(
        client_id=CLIENT,
        channel_seq=index + 1,
        request_id=index,
        sample_index=0,
        attempt=0,
        prompt_token_ids=prompt,
        output_token_ids=[],
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
    )
