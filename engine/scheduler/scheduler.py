"""The scheduler: the life of every sequence inside an engine, step by step.

A step is a transaction. ``plan`` reserves, ``apply`` commits; between the two a plan may be run again or dropped.
"""

from collections.abc import Sequence

from engine.config.engine_config import SchedulerConfig
from engine.interfaces.engine_core import RunnerLimits
from engine.interfaces.plan import Sample, ScheduledChunk, SequenceKey, SequenceState, StepPlan
from engine.scheduler.blocks import BlockPool
from engine.scheduler.outputs import OutputBuilder, draws_nothing, is_full, returns_only_logprobs, stops_at
from engine.scheduler.planner import Planner
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.request_queues import RequestQueues
from engine.wire.ids import ClientId
from engine.wire.load import Load
from engine.wire.messages import EngineCoreOutput, ErrorKind, FinishReason


class Scheduler:
    """Decides each step and commits what came of it. Pure: no clock, no thread, no device.

    Implements ``engine.interfaces.engine_core.RequestScheduler``, which is what an engine's process may ask of it.

    ``plan`` reserves: it admits, preempts and takes blocks, but moves no sequence forward. ``apply`` commits positions,
    tokens, the names of full blocks, counts and outputs. A plan may be run again as it is, or dropped: the next
    ``plan`` starts from the same tokens, and of what it would have written nothing can be found. A sequence that ends
    between ``plan`` and ``apply`` keeps its blocks until then, because the runner may still write them.

    max_len: prompt + output tokens of one sequence at most.

    Invariant: ``_sequences`` holds every sequence of the request queues that is not doomed.
    """

    def __init__(self, config: SchedulerConfig, limits: RunnerLimits) -> None:
        if config.max_num_seqs < 1 or config.max_num_batched_tokens < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        self._eos_token_ids = limits.eos_token_ids
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        self._cache = PrefixCache(self._pool, enabled=config.enable_prefix_caching)
        self._queues = RequestQueues(self._pool)
        self._planner = Planner(config, self._queues, self._pool, self._cache)
        # A sequence longer than the whole pool could never be admitted again after a preemption.
        self.max_len = min(limits.max_model_len, self._pool.num_tokens)
        self._sequences: dict[SequenceKey, SequenceState] = {}
        self._doomed: dict[SequenceState, FinishReason | None] = {}  # ended from outside; None: no output is owed
        self._output_builder = OutputBuilder()
        self._planned: StepPlan | None = None  # the plan that is out, between ``plan`` and ``apply``
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_prefix_query_tokens = 0
        self._num_prefix_hit_tokens = 0

    # --- what comes in ----------------------------------------------------------------------------------------------

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence that passed validation (see ``refuse`` for one that did not).

        A higher attempt replaces a live one, which ends with ABORT; an attempt that is not newer is a repetition and
        is ignored, because the live one answers. A sequence that has no token left to produce, and no log-probabilities
        or vector of its prompt to return, ends with LENGTH.
        """
        live = self._sequences.get(sequence.key)
        if live is not None:
            if sequence.attempt <= live.attempt:
                return
            self._drop(live, FinishReason.ABORT)
        if is_full(sequence, self.max_len) and not draws_nothing(sequence):
            self._output_builder.end(sequence, FinishReason.LENGTH)
            return
        self._sequences[sequence.key] = sequence
        self._queues.arrive(sequence)

    def refuse(self, sequence: SequenceState, error: str) -> None:
        """End a sequence that was never added. error: one sentence for the user, whose fault it is."""
        self._output_builder.end(sequence, FinishReason.ERROR, error=error, error_kind=ErrorKind.REQUEST)

    def abort(self, key: SequenceKey, attempt: int) -> None:
        """End a sequence with ABORT; an unknown one, or another attempt of it, is left alone."""
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.attempt == attempt:
            self._drop(sequence, FinishReason.ABORT)

    def give_back_all(self) -> None:
        """Give every sequence back with REROUTE: it goes on elsewhere behind its last token."""
        for sequence in list(self._sequences.values()):
            self._drop(sequence, FinishReason.REROUTE)

    def free_client(self, client_id: ClientId) -> None:
        """Free every sequence of a client that has gone; no output follows."""
        for sequence in [s for s in self._sequences.values() if s.client_id == client_id]:
            self._drop(sequence, None)
        for sequence in self._doomed:  # aborted while this plan was out: it would still be answered on apply
            if sequence.client_id == client_id:
                self._doomed[sequence] = None
        self._output_builder.forget(client_id)

    def stall_client(self, client_id: ClientId) -> None:
        """Give a client's sequences no more compute, slots and blocks until ``resume_client``."""
        self._queues.stall(client_id)
        self._settle()

    def resume_client(self, client_id: ClientId) -> None:
        """Let the sequences of a client that was stalled go on."""
        self._queues.resume(client_id)

    # --- pauses -----------------------------------------------------------------------------------------------------

    def hold_new_requests(self) -> None:
        """Let sequences that come from now on wait until ``release_held_requests``; idempotent."""
        self._queues.hold()

    def release_held_requests(self) -> None:
        """Let those that came since ``hold_new_requests`` run like all others; idempotent."""
        self._queues.release()

    def has_earlier(self) -> bool:
        """Tell whether there are sequences that are not held back, also such as cannot run now."""
        return self._queues.has_earlier

    def abort_earlier(self) -> None:
        """End every sequence that is not held back with ABORT."""
        for sequence in [s for s in self._sequences.values() if not s.is_held]:
            self._drop(sequence, FinishReason.ABORT)

    def preempt_all(self) -> None:
        """Take slots and blocks from all sequences and forget what the cache holds: its memory is about to go."""
        self._planned = None
        for sequence in list(self._queues.running):
            self._queues.preempt(sequence)
        self._settle()
        empty = self._cache.reset()
        assert empty, "no sequence uses a block any more"

    def reset_prefix_cache(self) -> bool:
        """Forget the content of every free block; True when the cache is empty now, because no content was in use."""
        return self._cache.reset()

    # --- a step -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decide the next step; an outstanding plan is dropped.

        No chunks means that nothing can run; ``apply`` still delivers the outputs that wait.
        """
        self._planned = None
        self._settle()
        self._planned = self._planner.plan()
        return self._planned

    def apply(self, plan: StepPlan, samples: Sequence[Sample], now: float) -> dict[ClientId, list[EngineCoreOutput]]:
        """Commit the outstanding plan and return the outputs of each client.

        samples: one per chunk that samples, in plan order. now: monotonic seconds at the start of the step.
        """
        assert plan is self._planned, "this plan was dropped"
        self._planned = None
        sampling = iter(samples)
        for chunk in plan.chunks:
            sample = next(sampling) if chunk.samples else None
            if chunk.sequence not in self._doomed:
                self._commit(chunk, sample, now)
        assert next(sampling, None) is None, "more samples than chunks that sample"
        self._settle()
        self._num_steps += bool(plan.chunks)
        return self._output_builder.take()

    def flush(self) -> dict[ClientId, list[EngineCoreOutput]]:
        """Return the outputs that wait, without running anything; an outstanding plan is dropped."""
        self._planned = None
        self._settle()
        return self._output_builder.take()

    def has_work(self) -> bool:
        """Tell whether a step would run a token or deliver an output; stalled clients are no work."""
        return bool(self._queues.can_run or self._output_builder)

    def load(self) -> Load:
        """Return the counters as they are now; between ``plan`` and ``apply`` those planned for the first time run."""
        return Load(
            num_waiting=self._queues.num_waiting,
            num_running=len(self._queues.running),
            num_waiting_tokens=self._queues.num_waiting_tokens,
            kv_usage=self._pool.usage,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_preemptions=self._queues.num_preemptions,
            num_prefix_query_tokens=self._num_prefix_query_tokens,
            num_prefix_hit_tokens=self._num_prefix_hit_tokens,
        )

    # --- committing -------------------------------------------------------------------------------------------------

    def _commit(self, chunk: ScheduledChunk, sample: Sample | None, now: float) -> None:
        sequence = chunk.sequence
        if sequence.scheduled_at is None:
            self._begin(sequence, now)
        end = chunk.start + chunk.num_tokens
        sequence.num_computed = end
        if sample is not None and sample.error is not None:
            # What it wrote may be the very fault; no other sequence shall find it.
            self._pool.forget(sequence.block_table)
            self._finish(sequence, FinishReason.ERROR, sample)
            return
        self._cache.commit(sequence, chunk.start, end)
        if sample is not None:
            self._take_sample(sequence, sample)

    def _begin(self, sequence: SequenceState, now: float) -> None:
        sequence.scheduled_at = now
        self._num_prefix_query_tokens += len(sequence.token_ids)
        self._num_prefix_hit_tokens += sequence.num_cached

    def _take_sample(self, sequence: SequenceState, sample: Sample) -> None:
        if sequence.num_output_tokens == sequence.num_resumed:  # once per attempt, also after a preemption
            self._num_prompt_tokens += sequence.num_prompt_tokens
        if sample.pooled is not None:
            self._finish(sequence, FinishReason.STOP, sample)
        elif returns_only_logprobs(sequence):
            self._finish(sequence, FinishReason.LENGTH, sample)
        elif stops_at(sequence, sample.token_id, self._eos_token_ids):
            self._finish(sequence, FinishReason.STOP, sample, stop_token_id=sample.token_id)
        else:
            sequence.token_ids.append(sample.token_id)
            self._num_generation_tokens += 1
            full = is_full(sequence, self.max_len)
            self._output_builder.token(sequence, sample, FinishReason.LENGTH if full else None)
            if full:
                self._leave(sequence)

    # --- ending -----------------------------------------------------------------------------------------------------

    def _finish(
        self, sequence: SequenceState, reason: FinishReason, sample: Sample, stop_token_id: int | None = None
    ) -> None:
        """End a sequence whose last sample is no token of its text."""
        self._output_builder.end(
            sequence,
            reason,
            stop_token_id=stop_token_id,
            error=sample.error,
            error_kind=sample.error_kind,
            prompt_logprobs=sample.prompt_logprobs,
            pooled=sample.pooled,
        )
        self._leave(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        del self._sequences[sequence.key]
        self._queues.leave(sequence)

    def _drop(self, sequence: SequenceState, reason: FinishReason | None) -> None:
        """End a sequence from outside: now, or on apply when a plan is out. No reason: no output."""
        del self._sequences[sequence.key]
        self._doomed[sequence] = reason
        self._settle()

    def _settle(self) -> None:
        """Let go of doomed sequences, and of the slots of stalled clients."""
        if self._planned is not None:
            return  # the runner may be writing into their blocks
        for sequence, reason in self._doomed.items():
            self._queues.leave(sequence)
            if reason is not None:
                self._output_builder.end(sequence, reason)
        self._doomed.clear()
        self._queues.set_stalled_aside()
