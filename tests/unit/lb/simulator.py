"""A group on a virtual clock: real ledgers and pickers, engines and a coordinator reduced to their timing."""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase
from lb.routing.ledger import EngineLedger, LedgerEntry
from lb.routing.picker import RotatingPicker

CHANNEL_DELAY_S = 0.001
REPORT_GAP_S = 0.020


class Clock:
    """Runs events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def at(self, when: float, act: Callable[[], object]) -> None:
        """Do something at a time, or now when that is past."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), act))

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        """Do something after a while."""
        self.at(self.now + delay_s, act)

    def run(self, until: float) -> None:
        """Run all events up to a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until


@dataclass(eq=False)
class Job:
    """One request on its way. service_s: how long it runs once admitted; infinity never ends. tokens: of KV cache."""

    client: "SimClient"
    service_s: float
    tokens: int = 0
    channel_seq: int = 0
    entry: LedgerEntry | None = None
    sent_at: float = 0.0


class SimEngine:
    """Runs what fits, ``num_slots`` jobs at most, and keeps the rest waiting; takes new ones only at its steps."""

    def __init__(self, clock: Clock, rank: int, num_slots: int, step_s: float, kv_tokens: float) -> None:
        self.engine_id = EngineId(rank, 1)
        self.num_received = 0
        self.waits_s: list[float] = []
        self.is_frozen = False
        self._clock = clock
        self._num_slots = num_slots
        self._step_s = step_s
        self._kv_tokens = kv_tokens
        self._num_tokens = 0
        self._queued: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._num_running = 0
        self._applied: dict[ClientId, int] = {}
        self._report_seq = 0

    def start(self) -> None:
        """Step from now on."""
        self._step()

    def receive(self, job: Job) -> None:
        """Take a job from the channel."""
        self._applied[job.client.client_id] = job.channel_seq
        self._queued.append(job)
        self.num_received += 1

    def report(self) -> EngineReport:
        """Return the next report."""
        self._report_seq += 1
        kv_usage = self._num_tokens / self._kv_tokens
        load = Load(len(self._queued), len(self._waiting), self._num_running, kv_usage=kv_usage)
        applied = dict(self._applied)
        return EngineReport(self.engine_id, self._report_seq, 1, 1, 1, 0, EnginePhase.RUNNING, 0, True, applied, load)

    def _step(self) -> None:
        if not self.is_frozen:
            self._waiting.extend(self._queued)
            self._queued.clear()
            while self._waiting and self._num_running < self._num_slots and self._fits(self._waiting[0]):
                job = self._waiting.popleft()
                self._num_running += 1
                self._num_tokens += job.tokens
                self.waits_s.append(self._clock.now - job.sent_at)
                if job.service_s != float("inf"):
                    self._clock.after(job.service_s, partial(self._finish, job))
        self._clock.after(self._step_s, self._step)

    def _fits(self, job: Job) -> bool:
        return self._num_tokens + job.tokens <= self._kv_tokens

    def _finish(self, job: Job) -> None:
        if self.is_frozen:
            self._clock.after(self._step_s, partial(self._finish, job))
            return
        self._num_running -= 1
        self._num_tokens -= job.tokens
        report_seq = self._report_seq + 1
        self._clock.after(CHANNEL_DELAY_S, partial(job.client.on_finished, self.engine_id, job, report_seq))


class SimClient:
    """Picks with a real ledger per engine and the real picker."""

    def __init__(self, clock: Clock, index: int, engines: list[SimEngine]) -> None:
        self.client_id = ClientId(index, 1)
        self.ledgers = {engine.engine_id: EngineLedger(engine.engine_id) for engine in engines}
        self.num_clients = 1
        self.on_end: Callable[[Job], object] | None = None
        self._clock = clock
        self._engines = {engine.engine_id: engine for engine in engines}
        self._picker = RotatingPicker(index)
        self._channel_seqs = dict.fromkeys(self.ledgers, 0)

    def add(self, service_s: float, tokens: int = 0) -> EngineId:
        """Pick an engine for a new job and send it."""
        engine_id = self._picker.pick(list(self.ledgers.values()), self.num_clients).engine_id
        self._channel_seqs[engine_id] += 1
        job = Job(self, service_s, tokens, self._channel_seqs[engine_id], sent_at=self._clock.now)
        job.entry = self.ledgers[engine_id].add(job.channel_seq)
        self._clock.after(CHANNEL_DELAY_S, partial(self._engines[engine_id].receive, job))
        return engine_id

    def on_finished(self, engine_id: EngineId, job: Job, report_seq: int) -> None:
        """Take the end of a job."""
        assert job.entry is not None
        self.ledgers[engine_id].finish(job.entry, report_seq)
        if self.on_end is not None:
            self.on_end(job)

    def on_snapshot(self, reports: list[EngineReport]) -> None:
        """Take a snapshot."""
        for report in reports:
            applied = report.applied.get(self.client_id, 0)
            self.ledgers[report.engine_id].on_report(report.report_seq, applied, report.load, self._clock.now)


@dataclass
class Group:
    """Clients, engines and snapshots; a group without ``snapshot_s`` has no coordinator."""

    num_clients: int = 1
    num_ranks: int = 4
    num_slots: int = 1000
    step_s: float = 0.010
    kv_tokens: float = float("inf")
    snapshot_s: float | None = 0.100
    seed: int = 0
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        shape = self.num_slots, self.step_s, self.kv_tokens
        self.engines = [SimEngine(self.clock, rank, *shape) for rank in range(self.num_ranks)]
        self.clients = [SimClient(self.clock, index, self.engines) for index in range(self.num_clients)]
        self.muted: set[EngineId] = set()
        self._reports: dict[EngineId, EngineReport] = {}
        for engine in self.engines:
            self.clock.at(self.rng.uniform(0, self.step_s), engine.start)
            self.clock.at(self.rng.uniform(0, REPORT_GAP_S), partial(self._report, engine))
        if self.snapshot_s is not None:
            self.clock.at(self.rng.uniform(0, self.snapshot_s), self._publish)
        for client in self.clients:
            client.num_clients = self.num_clients

    @property
    def num_received(self) -> list[int]:
        """Return how many jobs each rank got."""
        return [engine.num_received for engine in self.engines]

    def spread(self) -> int:
        """Return the difference between the ranks with most and fewest jobs."""
        return max(self.num_received) - min(self.num_received)

    def _report(self, engine: SimEngine) -> None:
        if engine.engine_id not in self.muted:
            self._reports[engine.engine_id] = engine.report()
        self.clock.after(REPORT_GAP_S, partial(self._report, engine))

    def _publish(self) -> None:
        assert self.snapshot_s is not None
        reports = list(self._reports.values())
        for client in self.clients:
            delay_s = self.rng.uniform(0.0005, 0.003)
            self.clock.after(delay_s, partial(client.on_snapshot, reports))
        self.clock.after(self.snapshot_s, self._publish)
