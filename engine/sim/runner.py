"""The sim runner: seeded tokens and a timing model, on the same scheduler and wire as a real model."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.config.engine_config import SchedulerConfig, SimConfig
from engine.interfaces.engine_core import RunnerLimits
from engine.interfaces.plan import Sample, ScheduledChunk, SequenceKey, SequenceState, StepPlan
from engine.sim.tokens import ALPHABET, prompt_hash, stream_base, token_at, vector_of
from engine.wire.tensors import Tensor

_LOAD_SLICES = 20
_FOREVER_S = 3600.0


class SimulatedCrashError(RuntimeError):
    """A prompt held the token that makes the engine die (``crash_on_token``)."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """What the runner works out once per sequence.

    prompt, base: see ``prompt_hash`` and ``stream_base``. fails: its request ends with an error, and it alone.
    """

    prompt: int
    base: int
    fails: bool


class SimRunner:
    """Implements ``engine.interfaces.engine_core.Runner``.

    Streams are remembered only while every step runs them, so nothing is left behind by sequences that ended; one that
    pauses is worked out again.
    """

    def __init__(
        self,
        config: SimConfig,
        scheduler: SchedulerConfig,
        on_progress: Callable[[str, float], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Pretend to load for ``load_s``. sleep: takes seconds; replaced in tests by a fake clock."""
        if config.vocab_size <= max(ALPHABET):
            raise ValueError(f"the sim engine speaks ASCII: vocab_size must be above {max(ALPHABET)}")
        self._config = config
        self._sleep = sleep
        self._streams: dict[SequenceKey, _Stream] = {}
        self._must_load = False
        self._limits = RunnerLimits(
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            num_blocks=config.num_kv_tokens // scheduler.block_size,
            block_size=scheduler.block_size,
            eos_token_ids=frozenset(),
            device="sim",
            dtype="none",
            features=frozenset({"prompt_embeds", "pooling"}),
            hidden_size=config.hidden_size,
        )
        self._load(on_progress)

    @property
    def limits(self) -> RunnerLimits:
        """Return the configured limits; the sim model never ends by itself, so it has no end token."""
        return self._limits

    def run(self, plan: StepPlan) -> list[Sample]:
        """Take the time such a step takes, then return one sample per chunk that samples."""
        known = self._streams
        # Built anew in every step, so that whatever is not in this one is forgotten.
        self._streams = {c.sequence.key: known.get(c.sequence.key) or self._begin(c.sequence) for c in plan.chunks}
        duration_s = step_duration_s(self._config, plan)
        if duration_s > 0:
            self._sleep(duration_s)
        return [self._sample(chunk) for chunk in plan.chunks if chunk.samples]

    def sleep(self, level: int) -> None:
        """Pretend to free memory; there is none to free."""
        self._streams = {}
        self._must_load = self._must_load or level > 1

    def wake_up(self, on_progress: Callable[[str, float], None]) -> None:
        """Pretend to load again what level 2 dropped."""
        if self._must_load:
            self._load(on_progress)
        self._must_load = False

    def close(self) -> None:
        """Hold nothing."""

    def _load(self, on_progress: Callable[[str, float], None] | None) -> None:
        for done in range(_LOAD_SLICES if self._config.load_s > 0 else 0):
            if on_progress is not None:
                on_progress("pretending to load weights", done / _LOAD_SLICES)
            self._sleep(self._config.load_s / _LOAD_SLICES)

    def _begin(self, sequence: SequenceState) -> _Stream:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        config = self._config
        if config.crash_on_token is not None and config.crash_on_token in prompt:
            raise SimulatedCrashError(f"request {sequence.request_id} holds the crash token {config.crash_on_token}")
        while config.hang_on_token is not None and config.hang_on_token in prompt:  # one sleep may be interrupted
            self._sleep(_FOREVER_S)
        seen = prompt_hash(prompt, None if sequence.prompt_embeds is None else sequence.prompt_embeds.data)
        return _Stream(
            seen,
            stream_base(seen, sequence.sampling.seed, sequence.sample_index),
            config.fail_on_token is not None and config.fail_on_token in prompt,
        )

    def _sample(self, chunk: ScheduledChunk) -> Sample:
        sequence = chunk.sequence
        stream = self._streams[sequence.key]
        if stream.fails:
            return Sample(0, f"the prompt holds the token {self._config.fail_on_token} that makes its request fail")
        if sequence.pooling is not None:
            size = self._config.hidden_size
            vector = vector_of(stream.prompt, size, normalize=sequence.pooling.normalize)
            return Sample(0, pooled=Tensor("float32", (size,), vector))
        return Sample(token_at(stream.base, sequence.num_output_tokens))


def step_duration_s(config: SimConfig, plan: StepPlan) -> float:
    """Return the seconds of a step in the timing model: a constant, prefill per token, decode per sequence."""
    num_decodes = sum(_is_decode(chunk) for chunk in plan.chunks)
    num_prefill_tokens = plan.num_tokens - num_decodes
    return config.step_s + config.prefill_s_per_token * num_prefill_tokens + config.decode_s_per_seq * num_decodes


def _is_decode(chunk: ScheduledChunk) -> bool:
    return chunk.num_tokens == 1 and chunk.start >= chunk.sequence.num_prompt_tokens
