"""The planner of a step: continuous batching with chunked prefill and preemption by recompute."""

from collections import defaultdict
from dataclasses import dataclass, field

from engine.config.engine_config import SchedulerConfig
from engine.interfaces.plan import ScheduledChunk, SequenceState, StepPlan
from engine.scheduler.blocks import BlockHash, BlockPool
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.request_queues import RequestQueues, order, precedence


@dataclass(slots=True)
class _Draft:
    """A plan in the making.

    room: tokens that still fit.
    computing: names of the blocks that its prompts compute next, by their index in the sequence.
    num_deferred: how many sequences at the head of the waiting queue wait for one of these blocks.
    num_deferred_blocks: how many blocks are kept free for them.
    """

    room: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    computing: defaultdict[int, set[BlockHash]] = field(default_factory=lambda: defaultdict(set))
    num_deferred: int = 0
    num_deferred_blocks: int = 0


class Planner:
    """Fills a step: decodes first, so that no prompt stalls them, then prompts under way and admissions in ``order``.

    Running sequences hold blocks for all tokens known when they were admitted and grow by one block at a time.

    A waiting sequence that begins with what the step computes already, as all samples of a prompt do but the first, is
    deferred until the cache has it. Its slot and blocks stay free meanwhile, and every step that defers it computes a
    part of its own beginning. It is never deferred for one that comes later in ``order``, so a promoted one not for
    long.
    """

    def __init__(
        self, config: SchedulerConfig, request_queues: RequestQueues, pool: BlockPool, cache: PrefixCache
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._max_num_tokens = config.max_num_batched_tokens
        self._queues = request_queues
        self._pool = pool
        self._cache = cache

    def plan(self) -> StepPlan:
        """Admit, preempt and take blocks for one step; no sequence moves forward."""
        self._queues.give_turn()
        self._make_way()
        num_preemptions = self._queues.num_preemptions
        draft = _Draft(self._max_num_tokens)
        self._plan_decodes(draft)
        # No admission when a decode had to preempt: the victim would come straight back.
        may_admit = self._queues.num_preemptions == num_preemptions
        self._plan_prefills(draft, may_admit=may_admit)
        return StepPlan(draft.chunks)

    # --- filling ----------------------------------------------------------------------------------------------------

    def _plan_decodes(self, draft: _Draft) -> None:
        for sequence in list(self._queues.running):  # a copy: growing one may preempt others
            if draft.room == 0:
                break
            start = sequence.num_computed
            # An empty table means that a decode before it preempted it.
            if len(sequence.token_ids) - start == 1 and sequence.block_table and self._grow(sequence):
                draft.chunks.append(ScheduledChunk(sequence, start, 1, True))
                draft.room -= 1

    def _plan_prefills(self, draft: _Draft, *, may_admit: bool) -> None:
        under_way = [s for s in self._queues.running if len(s.token_ids) - s.num_computed > 1]
        for sequence in under_way:
            # A waiting sequence of better order takes its tokens first: being admitted is no privilege of its own.
            if may_admit:
                self._plan_admissions(draft, before=sequence)
            if draft.room == 0:
                return
            self._plan_prefill(draft, sequence)
        if may_admit:
            self._plan_admissions(draft)

    def _plan_prefill(self, draft: _Draft, sequence: SequenceState) -> None:
        start = sequence.num_computed
        remaining = len(sequence.token_ids) - start
        num_tokens = min(remaining, draft.room)
        draft.chunks.append(ScheduledChunk(sequence, start, num_tokens, num_tokens == remaining))
        draft.room -= num_tokens
        if (block := self._cache.next_block(sequence)) is not None:
            index, name = block
            draft.computing[index].add(name)

    def _plan_admissions(self, draft: _Draft, before: SequenceState | None = None) -> None:
        while draft.room > 0 and len(self._queues.running) + draft.num_deferred < self._max_num_seqs:
            head = self._queues.waiting.at(draft.num_deferred)
            if head is None or (before is not None and order(before) < order(head)):
                break
            if self._defer(draft, head):
                continue
            if not self._admit(draft, head):
                break
            self._plan_prefill(draft, head)

    def _defer(self, draft: _Draft, sequence: SequenceState) -> bool:
        """Let a sequence wait, and keep room for it, when this step computes the block that it needs next."""
        for index, names in draft.computing.items():
            if self._cache.could_use(sequence, index, names):
                draft.num_deferred += 1
                draft.num_deferred_blocks += self._pool.blocks_for(len(sequence.token_ids)) - index
                return True
        return False

    # --- room in the cache ------------------------------------------------------------------------------------------

    def _admit(self, draft: _Draft, sequence: SequenceState) -> bool:
        hits = self._cache.find(sequence)
        num_free = self._pool.num_free - draft.num_deferred_blocks
        if not self._fits(self._demand(sequence, hits), num_free, len(self._queues.running) + draft.num_deferred):
            return False
        self._pool.share(hits)
        blocks = self._pool.allocate(self._pool.blocks_for(len(sequence.token_ids)) - len(hits))
        assert blocks is not None, "what fits can be allocated"
        num_computed = len(hits) * self._pool.block_size
        if sequence.scheduled_at is None:  # after a preemption it finds its own blocks, which says nothing of others'
            sequence.num_cached = num_computed
        self._queues.admit(sequence, hits + blocks, num_computed)
        return True

    def _make_way(self) -> None:
        """Preempt running sequences of a strictly worse precedence, last first, when the first that waits then fits."""
        head, running = self._queues.waiting.first(), self._queues.running
        if head is None or not running or precedence(running[-1]) <= precedence(head):
            return
        hits = self._cache.find(head)
        demand = self._demand(head, hits)
        num_free = self._pool.num_free - sum(map(self._needs_block, running))  # what this step's decodes will leave
        worse = [sequence for sequence in reversed(running) if precedence(sequence) > precedence(head)]
        num_victims = 0
        while not self._fits(demand, num_free, len(running) - num_victims):
            if num_victims == len(worse):
                return
            victim = worse[num_victims]
            # A block that two victims share is left out: only the last of them frees it. One that ``head`` finds in the
            # cache was never demanded.
            num_free += self._pool.num_exclusive(set(victim.block_table).difference(hits)) + self._needs_block(victim)
            num_victims += 1
        for victim in worse[:num_victims]:
            self._queues.preempt(victim)

    def _demand(self, sequence: SequenceState, hits: list[int]) -> int:
        """Return how many free blocks a waiting sequence needs: new ones, and hits that no sequence uses now."""
        return self._pool.blocks_for(len(sequence.token_ids)) - len(hits) + self._pool.num_unused(hits)

    def _fits(self, demand: int, num_free: int, num_running: int) -> bool:
        # One block of headroom for each running sequence, else their growth would soon preempt the new one.
        return num_running < self._max_num_seqs and num_free >= demand + num_running

    def _needs_block(self, sequence: SequenceState) -> bool:
        return len(sequence.block_table) * self._pool.block_size <= sequence.num_computed

    def _grow(self, sequence: SequenceState) -> bool:
        """Make room for the next position; False when the sequence itself had to go.

        The victim is the last in ``order``. Decodes are planned in that order, so no victim has a chunk in this plan.
        """
        while self._needs_block(sequence):
            blocks = self._pool.allocate(1)
            if blocks is not None:
                sequence.block_table += blocks
                continue
            victim = self._queues.running[-1]
            self._queues.preempt(victim)
            if victim is sequence:
                return False
        return True
