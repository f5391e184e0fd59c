"""Random lives of a scheduler: whatever the order of events, blocks and counts add up and everybody finishes."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.interfaces.plan import Sample, SequenceState, StepPlan
from engine.scheduler.outputs import returns_only_logprobs
from engine.wire.messages import EngineCoreOutput
from tests.unit.engine.builders import CLIENT, EOS, OTHER_CLIENT, make_scheduler, make_sequence
from tests.unit.engine.reference import FakeDevice, NaiveCache, content

NUM_BLOCKS = 9
BLOCK_SIZE = 3
MAX_SEQS = 3
MAX_TOKENS = 9
ODD = -1


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(MAX_SEQS, MAX_TOKENS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.device = FakeDevice(NUM_BLOCKS, BLOCK_SIZE)
        self.cache = NaiveCache(BLOCK_SIZE)
        self.live: dict[int, SequenceState] = {}
        self.told: dict[int, int] = {}
        self.ended: set[int] = set()
        self.freed: set[int] = set()
        self.leaving: set[int] = set()
        self.dropped: set[int] = set()
        self.plan: StepPlan | None = None
        self.running: set[int] = set()
        self.is_stalled = False
        self.is_holding = False
        self.held: set[int] = set()

    # --- events -----------------------------------------------------------------------------------------------------

    @rule(
        num_shared=st.integers(0, 9),
        num_own=st.integers(1, 4),
        num_output=st.integers(0, 3),
        max_tokens=st.integers(0, 12),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
        num_prompt_logprobs=st.sampled_from([None, None, None, 0]),
        other=st.booleans(),
        num_alike=st.sampled_from([1, 1, 2, 3]),
    )
    def add(
        self,
        num_shared: int,
        num_own: int,
        num_output: int,
        max_tokens: int,
        priority: int,
        salt: str | None,
        num_prompt_logprobs: int | None,
        other: bool,
        num_alike: int,
    ) -> None:
        """Add sequences that begin like many others and end like some."""
        own = len(self.told) % 2
        for request_id in range(len(self.told) + 1, len(self.told) + 1 + num_alike):
            sequence = make_sequence(
                request_id,
                prompt=(7,) * num_shared + (own,) * num_own,
                output_token_ids=(50,) * num_output,
                max_tokens=max_tokens,
                priority=priority,
                cache_salt=salt,
                num_prompt_logprobs=num_prompt_logprobs,
                client_id=OTHER_CLIENT if other else CLIENT,
            )
            self.live[request_id] = sequence
            self.told[request_id] = num_output
            if num_output >= max_tokens and not returns_only_logprobs(sequence):
                self.leaving.add(request_id)
            if self.is_holding:
                self.held.add(request_id)
            self.scheduler.add(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.dropped.add(request_id)
        self.leaving.add(request_id)
        self.scheduler.abort((request_id, 0), 0)

    @rule()
    def free_other_client(self) -> None:
        self.scheduler.free_client(OTHER_CLIENT)
        self.freed |= {i for i, s in self.live.items() if s.client_id == OTHER_CLIENT}
        self.dropped |= self.freed
        self.live = {i: s for i, s in self.live.items() if i not in self.freed}

    @rule(stalls=st.booleans())
    def other_client_takes(self, stalls: bool) -> None:
        self.is_stalled = stalls
        (self.scheduler.stall_client if stalls else self.scheduler.resume_client)(OTHER_CLIENT)

    @rule()
    def reset_cache(self) -> None:
        used = {block for sequence in self.scheduler._queues.running for block in sequence.block_table}
        assert self.scheduler.reset_prefix_cache() == self.cache.reset(used)

    @rule()
    def make_plan(self) -> None:
        """Also drops a plan that is out."""
        self.dropped.clear()
        self.running = {sequence.request_id for sequence in self.scheduler._queues.running}
        self.plan = self.scheduler.plan()
        self.check_plan(self.plan)
        self.cache.on_plan(self.plan)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def interrupt(self) -> None:
        """Let the runner break off; the plan runs again as it is, or is dropped."""
        assert self.plan is not None
        self.device.garble(self.plan)

    @precondition(lambda self: self.plan is not None)
    @rule(tokens=st.lists(st.sampled_from([50, 50, 51, EOS, ODD]), min_size=MAX_SEQS, max_size=MAX_SEQS))
    def apply(self, tokens: list[int]) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        self.device.run(plan)
        drawn = iter(tokens)
        token_of = {id(chunk): next(drawn) for chunk in plan.chunks if chunk.samples}
        kept = [c for c in plan.chunks if c.sequence.request_id not in self.dropped]
        self.cache.before_apply([(chunk, token_of.get(id(chunk)) == ODD) for chunk in kept])
        samples = [Sample(t, "odd" if t == ODD else None) for t in token_of.values()]
        self.dropped.clear()
        for client_outputs in self.scheduler.apply(plan, samples, 0.0).values():
            for output in client_outputs:
                self.check_output(output)

    @rule(holds=st.booleans())
    def pause(self, holds: bool) -> None:
        (self.scheduler.hold_new_requests if holds else self.scheduler.release_held_requests)()
        self.is_holding = holds
        if not holds:
            self.held.clear()

    @precondition(lambda self: self.is_holding)
    @rule()
    def abort_earlier(self) -> None:
        self.scheduler.abort_earlier()
        earlier = self.live.keys() - self.held
        self.dropped |= earlier
        self.leaving |= earlier

    @rule()
    def sleep(self) -> None:
        self.scheduler.preempt_all()
        self.plan = None
        self.dropped.clear()
        assert self.cache.reset(set())
        assert self.scheduler.load().kv_usage == 0

    @rule()
    def flush(self) -> None:
        """Tell what there is to tell without a step; a plan that is out is dropped."""
        self.plan = None
        self.dropped.clear()
        for client_outputs in self.scheduler.flush().values():
            for output in client_outputs:
                assert not output.new_token_ids
                self.check_output(output)

    # --- what must hold ---------------------------------------------------------------------------------------------

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= MAX_TOKENS
        assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks) <= MAX_SEQS
        for chunk in plan.chunks:
            sequence = chunk.sequence
            end = chunk.start + chunk.num_tokens
            assert chunk.num_tokens > 0
            assert chunk.start == sequence.num_computed
            assert chunk.samples == (end == len(sequence.token_ids))
            assert end <= len(sequence.block_table) * BLOCK_SIZE
            assert not (self.is_stalled and sequence.client_id == OTHER_CLIENT)
            assert sequence.request_id not in self.held
        self.check_nothing_is_computed_twice(plan)

    def check_nothing_is_computed_twice(self, plan: StepPlan) -> None:
        """No new request computes a block that somebody before it in the plan computes and it could have found."""
        computed: set[object] = set()
        for chunk in plan.chunks:
            sequence, next_end = chunk.sequence, (chunk.start // BLOCK_SIZE + 1) * BLOCK_SIZE
            is_new = sequence.request_id not in self.running
            if next_end < len(sequence.token_ids) and is_new and not sequence.awaits_prompt_logprobs:
                assert content(sequence, next_end) not in computed
            if len(sequence.token_ids) - chunk.start > 1 and next_end <= len(sequence.token_ids):
                computed.add(content(sequence, next_end))

    def check_output(self, output: EngineCoreOutput) -> None:
        request_id = output.request_id
        assert request_id not in self.ended | self.freed
        assert output.first_position == self.told[request_id]
        sequence = self.live[request_id]
        if output.new_token_ids and output.first_position == sequence.num_resumed:
            assert output.num_cached_tokens == min(self.cache.num_cached(sequence), sequence.num_prompt_tokens)
        self.told[request_id] += len(output.new_token_ids)
        if output.finish_reason is not None:
            self.ended.add(request_id)
            del self.live[request_id]

    @invariant()
    def references_are_exact_and_every_block_is_somewhere(self) -> None:
        pool, running = self.scheduler._pool, self.scheduler._queues.running
        users = Counter(block for sequence in running for block in sequence.block_table)
        assert pool._references == [users[block] for block in range(NUM_BLOCKS)]
        assert sorted([*users, *pool._blank, *pool._reusable]) == list(range(NUM_BLOCKS))
        assert len(running) <= MAX_SEQS
        assert all(sequence.block_table for sequence in running)

    @invariant()
    def only_equal_content_is_shared(self) -> None:
        seen: dict[int, object] = {}
        for sequence in self.scheduler._queues.running:
            for index, block in enumerate(sequence.block_table):
                end = (index + 1) * BLOCK_SIZE
                held = content(sequence, end) if end <= len(sequence.token_ids) else sequence.request_id
                assert seen.setdefault(block, held) == held

    @invariant()
    def the_cache_finds_what_was_committed_and_nothing_else(self) -> None:
        pool = self.scheduler._pool
        assert pool._hash_of.keys() == self.cache.contents.keys()
        assert pool._reusable.keys() <= pool._hash_of.keys()
        assert {block: name for name, block in pool._block_of.items()} == pool._hash_of

    @invariant()
    def counts_add_up(self) -> None:
        load, request_queues = self.scheduler.load(), self.scheduler._queues
        if self.plan is None:
            staying = [sequence for request_id, sequence in self.live.items() if request_id not in self.leaving]
            waiting = [sequence for sequence in staying if not sequence.block_table]
            assert load.num_running == len(staying) - len(waiting)
            assert (load.num_waiting, load.num_waiting_tokens) == (len(waiting), sum(len(s.token_ids) for s in waiting))
            earlier = {s.request_id for s in staying} - self.held
            assert self.scheduler.has_earlier() == bool(earlier)
        assert load.num_prefix_query_tokens == self.cache.num_query_tokens
        assert load.num_prefix_hit_tokens == self.cache.num_hit_tokens
        assert load.num_preemptions == request_queues.num_preemptions

    def teardown(self) -> None:
        """Everybody finishes, in a bounded number of steps, and everything is given back."""
        self.other_client_takes(stalls=False)
        self.pause(holds=False)
        tokens_left = sum(s.sampling.max_tokens + len(s.token_ids) for s in self.live.values())
        for _ in range(10 * tokens_left + 2):
            if self.scheduler.has_work():
                self.make_plan()
                self.apply([50] * MAX_SEQS)
        assert not self.scheduler.has_work()
        assert not self.live
        assert self.scheduler.load().kv_usage == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
