"""Which tokens run in the next step: continuous batching with chunked prefill and preemption by recompute."""

from bisect import insort
from collections.abc import Sequence

from engine.config import SchedulerConfig
from engine.core.protocol import RunnerLimits
from engine.scheduler.blocks import BlockPool
from engine.scheduler.finish import is_full, stops_at
from engine.scheduler.plan import Sample, ScheduledChunk, SequenceKey, SequenceState, StepPlan
from engine.scheduler.replies import Replies
from engine.scheduler.waiting import WaitingQueue, order
from engine.wire.ids import ClientId
from engine.wire.messages import EngineCoreOutput, FinishReason, Load


class Scheduler:
    """Decides each step as a transaction and commits what came of it. Pure: no clock, no thread, no device.

    ``plan`` reserves: it admits, preempts and takes blocks, but moves no sequence forward. ``apply`` commits. A plan
    may be run again as it is, or dropped: the next ``plan`` starts from the same tokens. A sequence that is dropped
    between ``plan`` and ``apply`` keeps its blocks until then, because the runner may still write them.

    Running sequences hold blocks for all tokens known when they were admitted and grow by one block at a time.
    Invariants: a running sequence has a non-empty block table and a waiting one an empty one; ``_running`` is sorted
    by ``order``; ``_sequences`` holds what is running or waiting and not doomed.
    """

    def __init__(self, config: SchedulerConfig, limits: RunnerLimits) -> None:
        if config.max_num_seqs < 1 or config.max_num_batched_tokens < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        self._config = config
        self._eos_token_ids = limits.eos_token_ids
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        # A sequence longer than the whole pool could never be admitted again after a preemption.
        self.max_len = min(limits.max_model_len, self._pool.num_tokens)
        self._sequences: dict[SequenceKey, SequenceState] = {}
        self._waiting = WaitingQueue()
        self._running: list[SequenceState] = []
        self._replies = Replies()
        self._planned: StepPlan | None = None
        self._doomed: dict[SequenceState, FinishReason | None] = {}
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preemptions = 0

    # --- what comes in ----------------------------------------------------------------------------------------------

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence that passed validation (see ``refuse`` for one that did not).

        A higher attempt replaces a live one, which ends with ABORT; an attempt that is not newer is a repetition and
        is ignored, because the live one answers. A sequence that has no token left to produce ends with LENGTH.
        """
        live = self._sequences.get(sequence.key)
        if live is not None:
            if sequence.attempt <= live.attempt:
                return
            self._drop(live, FinishReason.ABORT)
        if is_full(sequence, self.max_len):
            self._replies.end(sequence, FinishReason.LENGTH)
            return
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        self._sequences[sequence.key] = sequence
        self._waiting.push(sequence)

    def refuse(self, sequence: SequenceState, error: str) -> None:
        """End a sequence that was never added, with one sentence for the user."""
        self._replies.end(sequence, FinishReason.ERROR, error=error)

    def abort(self, key: SequenceKey, attempt: int) -> None:
        """End a sequence with ABORT; an unknown one, or another attempt of it, is left alone."""
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.attempt == attempt:
            self._drop(sequence, FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every sequence with ABORT."""
        for sequence in list(self._sequences.values()):
            self._drop(sequence, FinishReason.ABORT)

    def free_client(self, client_id: ClientId) -> None:
        """Free every sequence of a client and say nothing more to it."""
        for sequence in [s for s in self._sequences.values() if s.client_id == client_id]:
            self._drop(sequence, None)
        for sequence in self._doomed:
            if sequence.client_id == client_id:
                self._doomed[sequence] = None
        self._replies.forget(client_id)

    # --- a step -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decide the next step: decodes first, so that no prompt stalls them, then prompts under way, then new ones.

        An outstanding plan is dropped. No chunks means that nothing can run; ``apply`` still delivers what there is
        to say.
        """
        self._planned = None
        self._release_doomed()
        preemptions = self._num_preemptions
        chunks: list[ScheduledChunk] = []
        room = self._plan_decodes(chunks, self._config.max_num_batched_tokens)
        room = self._plan_prefills(chunks, room)
        if self._num_preemptions == preemptions:  # else the victim would come straight back
            self._plan_admissions(chunks, room)
        self._planned = StepPlan(chunks)
        return self._planned

    def apply(self, plan: StepPlan, samples: Sequence[Sample], now: float) -> dict[ClientId, list[EngineCoreOutput]]:
        """Commit the outstanding plan and return what to tell each client.

        samples: one per chunk that samples, in plan order. now: monotonic seconds at the start of the step.
        """
        assert plan is self._planned, "this plan was dropped"
        self._planned = None
        sampling = iter(samples)
        for chunk in plan.chunks:
            self._commit(chunk, next(sampling) if chunk.samples else None, now)
        assert next(sampling, None) is None, "more samples than chunks that sample"
        self._release_doomed()
        self._num_steps += bool(plan.chunks)
        return self._replies.take()

    def has_work(self) -> bool:
        """Tell whether a step would run a token or deliver an output."""
        return bool(self._sequences or self._doomed or self._replies)

    def load(self) -> Load:
        """Return the counters as they are now."""
        return Load(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_waiting_tokens=self._waiting.num_tokens,
            kv_usage=self._pool.usage,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_preemptions=self._num_preemptions,
        )

    # --- planning: each takes the room left in the step, in tokens, and returns what it leaves --------------------

    def _plan_decodes(self, chunks: list[ScheduledChunk], room: int) -> int:
        for sequence in list(self._running):
            if room == 0:
                break
            preempted = not sequence.block_table
            if not preempted and _remaining(sequence) == 1 and self._grow(sequence):
                chunks.append(ScheduledChunk(sequence, sequence.num_computed, 1, samples=True))
                room -= 1
        return room

    def _plan_prefills(self, chunks: list[ScheduledChunk], room: int) -> int:
        for sequence in self._running:
            if room > 0 and _remaining(sequence) > 1:
                room -= _append_prefill(chunks, sequence, room)
        return room

    def _plan_admissions(self, chunks: list[ScheduledChunk], room: int) -> int:
        while room > 0 and self._waiting and len(self._running) < self._config.max_num_seqs:
            sequence = self._waiting.first()
            needed = self._pool.blocks_for(len(sequence.token_ids))
            # One block of headroom for each one running, else their growth would soon preempt the newcomer.
            if self._pool.num_free < needed + len(self._running):
                break
            self._waiting.remove(sequence)
            # Prefix caching would begin here with the blocks another sequence computed already, and num_computed there.
            blocks = self._pool.allocate(needed)
            assert blocks is not None, "checked above"
            sequence.block_table = blocks
            insort(self._running, sequence, key=order)
            room -= _append_prefill(chunks, sequence, room)
        return room

    def _grow(self, sequence: SequenceState) -> bool:
        """Make room for the next position; False when the sequence itself had to go.

        The victim is the last in ``order``. Decodes are planned in that order, so no victim has a chunk in this plan.
        """
        while len(sequence.block_table) * self._pool.block_size <= sequence.num_computed:
            blocks = self._pool.allocate(1)
            if blocks is not None:
                sequence.block_table += blocks
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        self._running.remove(sequence)
        self._pool.free(sequence.block_table)
        sequence.num_computed = 0
        self._waiting.push(sequence)
        self._num_preemptions += 1

    # --- committing -------------------------------------------------------------------------------------------------

    def _commit(self, chunk: ScheduledChunk, sample: Sample | None, now: float) -> None:
        sequence = chunk.sequence
        if sequence in self._doomed:
            return
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
        sequence.num_computed = chunk.start + chunk.num_tokens
        if sample is None:
            return
        if sequence.num_output_tokens == sequence.num_resumed:
            self._num_prompt_tokens += sequence.num_prompt_tokens
        if sample.error is not None:
            self._replies.end(sequence, FinishReason.ERROR, error=sample.error)
        elif stops_at(sequence, sample.token_id, self._eos_token_ids):
            self._replies.end(sequence, FinishReason.STOP, stop_token_id=sample.token_id)
        elif not self._extend(sequence, sample.token_id):
            return
        del self._sequences[sequence.key]
        self._release(sequence)

    def _extend(self, sequence: SequenceState, token_id: int) -> bool:
        """Add a token and tell it; True when it was the last one."""
        sequence.token_ids.append(token_id)
        self._num_generation_tokens += 1
        full = is_full(sequence, self.max_len)
        self._replies.token(sequence, token_id, FinishReason.LENGTH if full else None)
        return full

    # --- ending -----------------------------------------------------------------------------------------------------

    def _drop(self, sequence: SequenceState, reason: FinishReason | None) -> None:
        """End a sequence from outside: now, or on apply when a plan is out. No reason means that nobody is told."""
        del self._sequences[sequence.key]
        self._doomed[sequence] = reason
        if self._planned is None:
            self._release_doomed()

    def _release_doomed(self) -> None:
        for sequence, reason in self._doomed.items():
            self._release(sequence)
            if reason is not None:
                self._replies.end(sequence, reason)
        self._doomed.clear()

    def _release(self, sequence: SequenceState) -> None:
        if sequence.block_table:
            self._running.remove(sequence)
            self._pool.free(sequence.block_table)
        else:
            self._waiting.remove(sequence)


def _remaining(sequence: SequenceState) -> int:
    return len(sequence.token_ids) - sequence.num_computed


def _append_prefill(chunks: list[ScheduledChunk], sequence: SequenceState, room: int) -> int:
    """Plan as much of a prompt as there is room for; return the tokens taken."""
    remaining = _remaining(sequence)
    num_tokens = min(remaining, room)
    chunks.append(ScheduledChunk(sequence, sequence.num_computed, num_tokens, samples=num_tokens == remaining))
    return num_tokens
