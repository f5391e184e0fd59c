"""A tiny stand-in for the scheduler: hand-made plans, so that runner tests decide exactly what shares a step."""

from collections.abc import Sequence

from engine.interfaces.engine_core import Runner
from engine.interfaces.plan import Sample, ScheduledChunk, SequenceState, StepPlan
from engine.wire.ids import ClientId
from engine.wire.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=1_000, temperature=0.0)


class Driver:
    """Hands out blocks from a shuffled-looking free list and keeps sequences in step with the runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        limits = runner.limits
        # Every second block first: a sequence's blocks are never neighbours.
        self._free = [*range(0, limits.num_blocks, 2), *range(1, limits.num_blocks, 2)]
        self._block_size = limits.block_size
        self._next_id = 0

    def add(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY, *, sample_index: int = 0) -> SequenceState:
        self._next_id += 1
        return SequenceState(
            client_id=ClientId(0, 1),
            request_id=self._next_id,
            sample_index=sample_index,
            attempt=0,
            sampling=sampling,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            received_at=0.0,
        )

    def free(self, sequence: SequenceState) -> None:
        self._free = sequence.block_table + self._free
        sequence.block_table = []

    def step(self, work: Sequence[tuple[SequenceState, int]]) -> list[Sample]:
        """Run up to that many unknown tokens of each sequence; append what was sampled."""
        chunks = [self._chunk(sequence, limit) for sequence, limit in work]
        samples = list(self.runner.run(StepPlan(chunks)))
        sampling = [chunk for chunk in chunks if chunk.samples]
        assert len(samples) == len(sampling)
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.num_tokens
        for chunk, sample in zip(sampling, samples, strict=True):
            if sample.error is None:
                chunk.sequence.token_ids.append(sample.token_id)
        return samples

    def generate(self, sequences: Sequence[SequenceState], num_tokens: int, chunk: int) -> list[list[int]]:
        """Run all sequences together until each has ``num_tokens`` output tokens; return those."""
        while unfinished := [s for s in sequences if s.num_output_tokens < num_tokens]:
            self.step([(sequence, chunk) for sequence in unfinished])
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]

    def _chunk(self, sequence: SequenceState, limit: int) -> ScheduledChunk:
        start = sequence.num_computed
        num_tokens = min(limit, len(sequence.token_ids) - start)
        while len(sequence.block_table) * self._block_size < start + num_tokens:
            sequence.block_table.append(self._free.pop(0))
        return ScheduledChunk(sequence, start, num_tokens, samples=start + num_tokens == len(sequence.token_ids))
