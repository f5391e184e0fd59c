"""The load rule, term by term, and a machine that checks it against an engine which is counted exactly."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.wire.ids import EngineId
from engine.wire.load import Load
from lb.routing.ledger import EngineLedger, LedgerEntry


def _ledger() -> EngineLedger:
    return EngineLedger(EngineId(0, 1))


def test_without_a_report_the_load_is_the_clients_own_times_the_clients() -> None:
    ledger = _ledger()
    first = ledger.add(1)
    ledger.add(2)
    assert (ledger.load(1), ledger.load(4)) == (2, 8)
    ledger.finish(first, report_seq=1)
    assert ledger.load(1) == 1


def test_a_report_counts_waiting_four_times() -> None:
    ledger = _ledger()
    ledger.on_report(1, 0, Load(num_waiting=2, num_running=3), now=0.0)
    assert ledger.load(1) == 11


def test_arrivals_weigh_one_where_nobody_waits_and_four_where_somebody_does() -> None:
    quiet, busy = _ledger(), _ledger()
    quiet.on_report(1, 0, Load(num_queued=2, num_running=3), now=0.0)
    busy.on_report(1, 0, Load(num_queued=2, num_waiting=1, num_running=3), now=0.0)
    assert (quiet.load(1), busy.load(1)) == (5, 15)
    quiet.add(1)
    busy.add(1)
    assert (quiet.load(1), busy.load(1)) == (6, 19)


def test_own_requests_behind_applied_are_added_once_per_client() -> None:
    ledger = _ledger()
    for channel_seq in (1, 2, 3):
        ledger.add(channel_seq)
    ledger.on_report(1, 2, Load(num_running=2), now=0.0)
    assert (ledger.load(1), ledger.load(4)) == (3, 6)


def test_own_requests_that_ended_since_the_report_are_taken_off() -> None:
    ledger = _ledger()
    entries = [ledger.add(channel_seq) for channel_seq in (1, 2)]
    ledger.on_report(5, 2, Load(num_running=2), now=0.0)
    ledger.finish(entries[0], report_seq=6)
    assert ledger.load(1) == 1
    ledger.on_report(6, 2, Load(num_running=1), now=0.0)
    assert ledger.load(1) == 1


def test_an_end_takes_off_a_waiting_weight_while_somebody_waits_for_its_place() -> None:
    ledger = _ledger()
    entries = [ledger.add(channel_seq) for channel_seq in range(1, 6)]
    ledger.on_report(1, 5, Load(num_waiting=2, num_running=3), now=0.0)
    loads = [ledger.load(1)]
    for entry in entries:
        ledger.finish(entry, report_seq=2)
        loads.append(ledger.load(1))
    assert loads == [11, 7, 3, 2, 1, 0]


def test_a_request_that_ended_before_any_report_showed_it_counts_nowhere() -> None:
    ledger = _ledger()
    entry = ledger.add(1)
    ledger.on_report(1, 0, Load(), now=0.0)
    ledger.finish(entry, report_seq=4)
    assert ledger.load(1) == 0
    ledger.on_report(3, 1, Load(num_running=1), now=0.0)  # sent while it ran
    assert ledger.load(1) == 0
    ledger.on_report(4, 1, Load(), now=0.0)
    assert ledger.load(1) == 0


def test_an_old_or_repeated_report_changes_nothing() -> None:
    ledger = _ledger()
    ledger.on_report(7, 0, Load(num_running=1), now=0.0)
    ledger.on_report(7, 0, Load(num_running=9), now=1.0)
    ledger.on_report(6, 0, Load(num_running=9), now=1.0)
    assert (ledger.load(1), ledger.fresh_at) == (1, 0.0)


def test_a_stale_report_counts_no_more_until_a_new_one_comes() -> None:
    ledger = _ledger()
    ledger.add(1)
    ledger.on_report(1, 1, Load(num_running=50), now=0.0)
    ledger.stale = True
    assert ledger.load(2) == 2
    ledger.on_report(2, 1, Load(num_running=50), now=9.0)
    assert ledger.load(2) == 50


def test_a_withdrawn_request_leaves_no_trace() -> None:
    ledger = _ledger()
    ledger.withdraw(ledger.add(1))
    assert (ledger.load(1), ledger.num_unfinished, ledger.num_picks) == (0, 0, 0)


class LedgerMachine(RuleBasedStateMachine):
    """One client alone on one engine: the ledger's load must be what is truly unfinished, whatever is in transit.

    The engine applies messages in order, runs them all, and reports with numbers; reports reach the client late, and
    ends reach it with the number of the first report that reflects them. Nobody waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = _ledger()
        self.channel_seq = 0
        self.sent: list[tuple[int, LedgerEntry]] = []  # on the channel, not applied
        self.running: list[LedgerEntry] = []
        self.ends: list[tuple[LedgerEntry, int]] = []  # frames on their way to the client
        self.reports: list[tuple[int, int, int]] = []  # reports on their way: number, applied, running
        self.report_seq = 0
        self.applied = 0

    @rule()
    def add(self) -> None:
        self.channel_seq += 1
        self.sent.append((self.channel_seq, self.ledger.add(self.channel_seq)))

    @rule()
    def refused_send(self) -> None:
        self.ledger.withdraw(self.ledger.add(self.channel_seq + 1))

    @precondition(lambda self: self.sent)
    @rule()
    def engine_applies(self) -> None:
        self.applied, entry = self.sent.pop(0)
        self.running.append(entry)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def engine_ends_one(self, data: st.DataObject) -> None:
        entry = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.ends.append((entry, self.report_seq + 1))

    @rule()
    def engine_reports(self) -> None:
        self.report_seq += 1
        self.reports.append((self.report_seq, self.applied, len(self.running)))

    @precondition(lambda self: self.ends)
    @rule()
    def client_hears_an_end(self) -> None:
        self.ledger.finish(*self.ends.pop(0))

    @precondition(lambda self: self.reports)
    @rule(lose=st.booleans(), repeat=st.booleans())
    def client_hears_a_report(self, *, lose: bool, repeat: bool) -> None:
        number, applied, running = self.reports.pop(0)
        for _ in range(0 if lose else 1 + repeat):
            self.ledger.on_report(number, applied, Load(num_running=running), now=0.0)

    @invariant()
    def what_is_unfinished_is_what_the_client_has_not_seen_end(self) -> None:
        unfinished = len(self.sent) + len(self.running) + len(self.ends)
        assert self.ledger.num_unfinished == unfinished

    @invariant()
    def no_counter_is_negative(self) -> None:
        assert min(self.ledger.num_finished, self.ledger.num_unfinished, self.ledger.load(3)) >= 0

    @invariant()
    def the_load_lies_between_what_runs_and_what_the_client_has_not_seen_end(self) -> None:
        """Alone on its engine a client is exact: it can only miss ends that are still on their way to it."""
        if self.ledger.stale:
            assert self.ledger.load(1) == self.ledger.num_unfinished
        else:
            assert len(self.sent) + len(self.running) <= self.ledger.load(1) <= self.ledger.num_unfinished


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=100)
