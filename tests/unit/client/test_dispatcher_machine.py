"""Random life of a dispatcher among engines that answer as engines do: each sequence arrives whole, whatever comes."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from client.engine_connection import EngineConnection
from client.migration import MigrationConfig
from client.sequences import MigrationReason
from engine.wire.errors import InvalidRequestError, OverloadedError
from engine.wire.ids import EngineId
from engine.wire.messages import AbortRequest, AddRequest, EngineCoreOutput, FinishReason
from tests.unit.client.builders import make_add, make_end, make_tokens
from tests.unit.client.group import Group

Name = tuple[int, int]

NUM_TOKENS = 6
CONFIG = MigrationConfig(tokens_in_flight=30, timeout_s=10)


def token_at(request_id: int, sample_index: int, position: int) -> int:
    """Return the token every engine draws at a place: a function of the sequence and the position alone."""
    return 100 * request_id + 10 * sample_index + position


class FakeEngine:
    """Runs what it was sent, in order, and speaks when the test says so; what it said may be lost."""

    def __init__(self, connection: EngineConnection) -> None:
        self.connection = connection
        self.running: dict[Name, tuple[AddRequest, int]] = {}
        self.pending: list[EngineCoreOutput] = []
        self.has_lost = False

    def take(self, message: object) -> None:
        """Take one message of the line."""
        if isinstance(message, AddRequest):
            self.running[message.request_id, message.sample_index] = message, len(message.output_token_ids)
            known = [
                token_at(message.request_id, message.sample_index, i) for i in range(len(message.output_token_ids))
            ]
            assert message.output_token_ids == known, "a resumed sequence goes on behind exactly the tokens it has"
        elif isinstance(message, AbortRequest):
            name = message.request_id, message.sample_index
            request, position = self.running.get(name, (None, 0))
            if request is not None and request.attempt == message.attempt:
                del self.running[name]
                self.pending.append(make_end(request, FinishReason.ABORT, position))

    def step(self, count: int) -> None:
        """Draw ``count`` tokens for everybody."""
        for name, (request, position) in list(self.running.items()):
            stop = min(NUM_TOKENS, position + count)
            output = make_tokens(request, position, *(token_at(*name, i) for i in range(position, stop)))
            self.running[name] = request, stop
            if stop == NUM_TOKENS:
                output.finish_reason = FinishReason.LENGTH
                del self.running[name]
            self.pending.append(output)

    def give_back(self, name: Name) -> None:
        """Reroute one."""
        request, position = self.running.pop(name)
        waiting = [o for o in self.pending if (o.request_id, o.sample_index, o.attempt) == (*name, request.attempt)]
        if waiting:  # the output queue merges what has not been sent
            waiting[-1].finish_reason = FinishReason.REROUTE
        else:
            self.pending.append(make_end(request, FinishReason.REROUTE, position))


class DispatcherMachine(RuleBasedStateMachine):
    """``owed``: accepted and not yet told their end. ``told``: the tokens each was given, in the order they came."""

    def __init__(self) -> None:
        super().__init__()
        self.group = Group(0, CONFIG)
        self.engines: dict[EngineId, FakeEngine] = {}
        self.owed: dict[Name, AddRequest] = {}
        self.told: dict[Name, list[int]] = {}
        self.aborted: set[Name] = set()
        self.ends: Counter[Name] = Counter()
        self.num_delivered = 0
        self.incarnations: Counter[int] = Counter()
        self.clock = 0.0
        for rank in range(3):
            self._open(rank)

    # --- the wire: engines receive at once, in order ---

    def _deliver(self) -> None:
        for engine_id, message in self.group.sender.sent[self.num_delivered :]:
            if engine_id in self.engines:
                self.engines[engine_id].take(message)
        self.num_delivered = len(self.group.sender.sent)

    def _tell(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            name = output.request_id, output.sample_index
            assert name in self.owed, "nothing follows an end"
            if output.first_position >= 0:
                assert output.first_position == len(self.told[name])
            self.told[name] += output.new_token_ids
            if output.finish_reason is not None:
                self._check_end(name, output)
        self._deliver()

    def _check_end(self, name: Name, output: EngineCoreOutput) -> None:
        assert output.finish_reason is not FinishReason.REROUTE
        if output.finish_reason is FinishReason.LENGTH:
            assert len(self.told[name]) == NUM_TOKENS
        elif output.finish_reason is FinishReason.ABORT:
            assert name in self.aborted
        else:
            assert any(
                why in (output.error or "") for why in ("two engines in a row", "--move-timeout", "no new requests")
            )
        del self.owed[name]
        self.ends[name] += 1

    def _open(self, rank: int) -> None:
        self.incarnations[rank] += 1
        connection = self.group.open(rank, self.incarnations[rank])
        self.engines[connection.engine_id] = FakeEngine(connection)

    def _pick_engine(self, data: st.DataObject) -> FakeEngine:
        return self.engines[data.draw(st.sampled_from(sorted(self.engines)))]

    # --- what happens ---

    @rule(num_samples=st.integers(1, 3), rank=st.none() | st.integers(0, 4), size=st.integers(1, 20))
    def add(self, num_samples: int, rank: int | None, size: int) -> None:
        request_id = len(self.told) + 1
        for sample_index in range(num_samples):
            request = make_add(request_id, sample_index, size)
            try:
                self.group.dispatcher.route(request, rank)
            except (OverloadedError, InvalidRequestError):
                continue
            self.owed[request_id, sample_index] = request
            self.told[request_id, sample_index] = []
        self._deliver()

    @precondition(lambda self: self.owed)
    @rule(data=st.data(), alone=st.booleans())
    def abort(self, data: st.DataObject, alone: bool) -> None:
        request_id, sample_index = data.draw(st.sampled_from(sorted(self.owed)))
        self.aborted |= {name for name in self.owed if name[0] == request_id and (not alone or name[1] == sample_index)}
        self.group.dispatcher.abort(request_id, sample_index if alone else None)
        self._tell(self.group.settle())

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), count=st.integers(1, 3), repeat=st.booleans(), report_seq=st.integers(1, 50))
    def step(self, data: st.DataObject, count: int, repeat: bool, report_seq: int) -> None:
        engine = self._pick_engine(data)
        engine.step(count)
        outputs, engine.pending = engine.pending, []
        is_gap, engine.has_lost = engine.has_lost, False
        applied = engine.connection.next_seq - 1
        self._tell(self.group.hear(engine.connection, *outputs, report_seq=report_seq, is_gap=is_gap, applied=applied))
        if repeat:
            self._tell(self.group.hear(engine.connection, *outputs, report_seq=report_seq))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), count=st.integers(0, 2))
    def lose_a_frame(self, data: st.DataObject, count: int) -> None:
        engine = self._pick_engine(data)
        engine.step(count)
        engine.pending = []
        engine.has_lost = True

    @precondition(lambda self: any(engine.running for engine in self.engines.values()))
    @rule(data=st.data())
    def reroute(self, data: st.DataObject) -> None:
        busy = sorted(engine_id for engine_id, engine in self.engines.items() if engine.running)
        engine = self.engines[data.draw(st.sampled_from(busy))]
        engine.give_back(data.draw(st.sampled_from(sorted(engine.running))))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), count=st.integers(1, 2))
    def step_unsent(self, data: st.DataObject, count: int) -> None:
        self._pick_engine(data).step(count)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def refuse_or_accept(self, data: st.DataObject) -> None:
        self.group.sender.refusing = data.draw(st.sets(st.sampled_from(sorted(self.engines)), max_size=2))
        for connection in self.group.connections.values():
            connection.blocked = False
        self.group.dispatcher.refresh()
        self._tell(self.group.settle())

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), drain=st.booleans())
    def leave_or_return(self, data: st.DataObject, drain: bool) -> None:
        connection = self._pick_engine(data).connection
        connection.leaving = not connection.leaving
        self.group.dispatcher.refresh()
        if connection.leaving and drain:
            self.group.dispatcher.migrate_from(connection, "drained")
        self._tell(self.group.settle())

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), replace=st.booleans())
    def kill(self, data: st.DataObject, replace: bool) -> None:
        engine_id = self._pick_engine(data).connection.engine_id
        connection = self.engines.pop(engine_id).connection
        self._tell(self.group.close(connection))
        if replace:
            self._open(engine_id.rank)
            self._tell(self.group.settle())

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def begin_anew(self, data: st.DataObject) -> None:
        engine_id = self._pick_engine(data).connection.engine_id
        connection = self.engines.pop(engine_id).connection
        self._tell(self.group.close(connection, MigrationReason.RESTART))
        connection = self.group.open(engine_id.rank, engine_id.incarnation)
        self.engines[engine_id] = FakeEngine(connection)
        self._tell(self.group.settle())

    @rule()
    def scale_up(self) -> None:
        rank = max((engine_id.rank for engine_id in self.engines), default=-1) + 1
        if rank < 6:
            self._open(rank)
            self._tell(self.group.settle())

    @rule(seconds=st.sampled_from([0.2, 4.0]))
    def wait(self, seconds: float) -> None:
        self.clock += seconds
        self.group.dispatcher.on_time(self.clock)
        self._tell(self.group.settle())

    # --- what is always true ---

    @invariant()
    def the_table_holds_what_is_owed(self) -> None:
        table = self.group.dispatcher.in_flight
        assert set(table.by_name) == set(self.owed)
        assert all([name[1] for name in self.owed if name[0] == request_id] for request_id in table._samples)

    @invariant()
    def each_is_on_one_line_and_in_its_ledger_or_waits(self) -> None:
        table = self.group.dispatcher.in_flight
        on_lines = 0
        for connection in self.group.connections.values():
            ledger = connection.ledger
            assert ledger.num_unfinished == len(table.on_connection(connection))
            assert min(ledger.num_finished, ledger.num_unfinished, ledger.load(2)) >= 0
            on_lines += ledger.num_unfinished
        assert on_lines + self.group.dispatcher.num_waiting == len(table)

    @invariant()
    def engines_are_given_no_more_than_they_may_compute_anew(self) -> None:
        tokens: Counter[EngineId] = Counter()
        largest: Counter[EngineId] = Counter()
        for sequence in self.group.dispatcher.in_flight.by_name.values():
            if sequence.num_migrated_tokens:
                assert sequence.placement is not None
                engine_id = sequence.placement.connection.engine_id
                tokens[engine_id] += sequence.num_migrated_tokens
                largest[engine_id] = max(sequence.num_migrated_tokens, largest[engine_id])
        assert tokens == self.group.dispatcher._migrations._tokens
        assert all(tokens[engine_id] <= max(30, largest[engine_id]) for engine_id in tokens)

    @invariant()
    def everybody_is_told_the_right_tokens_and_one_end(self) -> None:
        for name, tokens in self.told.items():
            assert tokens == [token_at(*name, position) for position in range(len(tokens))]
            assert self.ends[name] == (name not in self.owed)


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(max_examples=100, stateful_step_count=100)
