"""Random lives of a scheduler: whatever the order of events, blocks and counts add up and everybody finishes."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.scheduler.plan import Sample, SequenceState, StepPlan
from engine.wire.messages import EngineCoreOutput
from tests.unit.engine.builders import CLIENT, EOS, OTHER_CLIENT, make_scheduler, make_sequence

NUM_BLOCKS = 7
BLOCK_SIZE = 4
MAX_SEQS = 3
MAX_TOKENS = 9


class SchedulerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.scheduler = make_scheduler(MAX_SEQS, MAX_TOKENS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.live: dict[int, SequenceState] = {}
        self.told: dict[int, int] = {}
        self.ended: set[int] = set()
        self.freed: set[int] = set()
        self.num_added = 0
        self.plan: StepPlan | None = None

    @rule(
        num_prompt=st.integers(1, 12),
        num_output=st.integers(0, 3),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 1),
        other=st.booleans(),
    )
    def add(self, num_prompt: int, num_output: int, max_tokens: int, priority: int, other: bool) -> None:
        self.num_added += 1
        sequence = make_sequence(
            self.num_added,
            num_prompt,
            output_token_ids=(50,) * num_output,
            max_tokens=max_tokens,
            priority=priority,
            client_id=OTHER_CLIENT if other else CLIENT,
        )
        self.live[self.num_added] = sequence
        self.told[self.num_added] = num_output
        self.scheduler.add(sequence)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.live:
            self.scheduler.abort((data.draw(st.sampled_from(sorted(self.live))), 0), 0)

    @rule()
    def free_other_client(self) -> None:
        self.scheduler.free_client(OTHER_CLIENT)
        self.freed |= {i for i, s in self.live.items() if s.client_id == OTHER_CLIENT}
        self.live = {i: s for i, s in self.live.items() if i not in self.freed}

    @rule()
    def make_plan(self) -> None:
        """Also drops a plan that is out."""
        self.plan = self.scheduler.plan()
        self.check_plan(self.plan)

    @precondition(lambda self: self.plan is not None)
    @rule(tokens=st.lists(st.sampled_from([50, 51, EOS, -1]), min_size=MAX_SEQS, max_size=MAX_SEQS))
    def apply(self, tokens: list[int]) -> None:
        assert self.plan is not None
        sampling = [chunk for chunk in self.plan.chunks if chunk.samples]
        samples = [Sample(t, "odd" if t == -1 else None) for t in tokens[: len(sampling)]]
        outputs = self.scheduler.apply(self.plan, samples, 0.0)
        self.plan = None
        for client_outputs in outputs.values():
            for output in client_outputs:
                self.check_output(output)

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= MAX_TOKENS
        assert len(plan.chunks) <= MAX_SEQS
        assert len({id(c.sequence) for c in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            end = chunk.start + chunk.num_tokens
            assert chunk.num_tokens > 0
            assert chunk.start == sequence.num_computed
            assert chunk.samples == (end == len(sequence.token_ids))
            assert end <= len(sequence.block_table) * BLOCK_SIZE

    def check_output(self, output: EngineCoreOutput) -> None:
        request_id = output.request_id
        assert request_id not in self.ended
        assert request_id not in self.freed
        assert output.first_position == self.told[request_id]
        self.told[request_id] += len(output.new_token_ids)
        if output.finish_reason is not None:
            self.ended.add(request_id)
            del self.live[request_id]

    @invariant()
    def blocks_are_neither_shared_nor_leaked(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        held = [b for s in self.scheduler._running for b in s.block_table]
        assert len(held) == len(set(held))
        assert sorted(held + self.scheduler._pool._free) == list(range(NUM_BLOCKS))
        assert len(self.scheduler._running) <= MAX_SEQS
        assert all(s.block_table for s in self.scheduler._running)

    @invariant()
    def waiting_tokens_add_up(self) -> None:
        if hasattr(self, "scheduler"):
            waiting = self.scheduler._waiting._sequences
            assert self.scheduler.load().num_waiting_tokens == sum(len(s.token_ids) for s in waiting)

    def teardown(self) -> None:
        """Everybody finishes, in a bounded number of steps, and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
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
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
