"""The request queues of an engine: its running, waiting, stalled and held sequences, and the turns among them."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from engine.interfaces.plan import SequenceState
from engine.scheduler.blocks import BlockPool
from engine.wire.ids import ClientId

ADMISSIONS_PER_TURN = 32
"""After so many admissions the oldest goes first, whatever its priority."""

_BEFORE_NEW_REQUESTS = 1 << 60  # more than ever arrive, so migrated sequences sort before all that began here

Precedence = tuple[bool, int]


def precedence(sequence: SequenceState) -> Precedence:
    """Return what decides between sequences before their arrival does: lower is better."""
    return not sequence.is_promoted, sequence.priority


def order(sequence: SequenceState) -> tuple[bool, int, int]:
    """Return the sort key of a sequence: lower runs earlier, the highest is preempted first."""
    return not sequence.is_promoted, sequence.priority, sequence.arrival


class WaitingQueue:
    """A list kept sorted by ``order``; a preempted sequence comes back to the place its arrival gives it.

    A sorted list beats a heap here: an abort takes a sequence out of the middle, and moving 10,000 pointers costs 2 us.
    """

    def __init__(self) -> None:
        self._sequences: list[SequenceState] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._sequences)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all sequences here: what must be computed before each has its next token."""
        return self._num_tokens

    def first(self) -> SequenceState | None:
        """Return the sequence that runs next."""
        return self._sequences[0] if self._sequences else None

    def at(self, place: int) -> SequenceState | None:
        """Return the sequence that runs after ``place`` others."""
        return self._sequences[place] if place < len(self._sequences) else None

    def push(self, sequence: SequenceState) -> None:
        """Let a sequence wait; neither its tokens nor its ``order`` may change until it leaves."""
        insort(self._sequences, sequence, key=order)
        self._num_tokens += len(sequence.token_ids)

    def remove(self, sequence: SequenceState) -> None:
        """Take a waiting sequence out, wherever it stands."""
        index = bisect_left(self._sequences, order(sequence), key=order)
        assert self._sequences[index] is sequence, "the sequence does not wait here"
        del self._sequences[index]
        self._num_tokens -= len(sequence.token_ids)


class RequestQueues:
    """Every live sequence, each in one queue: running, waiting, aside (its client is stalled) or held (by a pause).

    Invariants: a running sequence has a non-empty block table and any other an empty one; ``running`` is sorted by
    ``order``; a sequence of a stalled client is aside, held, or running until ``set_stalled_aside``.

    No sequence starves. Promoted ones come before all others, in the order of arrival, so only finitely many ever
    precede one of them; the first of all is never preempted and gets its tokens first. And every sequence is promoted
    or has finished in the end, because each turn takes the oldest.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.running: list[SequenceState] = []
        self.waiting = WaitingQueue()
        self.num_preemptions = 0
        self._aside: dict[ClientId, WaitingQueue] = {}
        self._held = WaitingQueue()
        self._is_holding = False
        self._num_arrivals = 0
        self._num_admissions = 0

    @property
    def can_run(self) -> bool:
        """Tell whether any sequence could get tokens in a step."""
        return bool(self.running or self.waiting)

    @property
    def num_waiting(self) -> int:
        """Return how many sequences do not run."""
        return sum(map(len, self._queues()))

    @property
    def num_waiting_tokens(self) -> int:
        """Return the tokens of all sequences that do not run."""
        return sum(queue.num_tokens for queue in self._queues())

    def arrive(self, sequence: SequenceState) -> None:
        """Take a new sequence in.

        One that was migrated here is no new request but a preempted one that goes on: it comes before all that began
        here, as it would have on its first engine. It takes no other's slot, because its priority is not better.
        """
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals - (_BEFORE_NEW_REQUESTS if sequence.attempt else 0)
        sequence.is_held = self._is_holding
        self._queue(sequence).push(sequence)

    def admit(self, sequence: SequenceState, blocks: list[int], num_computed: int) -> None:
        """Let the waiting sequence run in these blocks, of which the first tokens are computed already."""
        self._num_admissions += 1
        self.waiting.remove(sequence)
        sequence.block_table = blocks
        sequence.num_computed = num_computed
        insort(self.running, sequence, key=order)

    def preempt(self, sequence: SequenceState) -> None:
        """Let a running sequence wait again; it will be computed anew, from what the cache still holds."""
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._pool.free(sequence.block_table)
        # Recompute, not swap: most of its blocks keep their content in the pool and are found again on admission.
        sequence.num_computed = 0
        self._queue(sequence).push(sequence)

    def leave(self, sequence: SequenceState) -> None:
        """Take a sequence out, wherever it stands."""
        if sequence.block_table:
            self.running.remove(sequence)
            self._pool.free(sequence.block_table)
        else:
            self._queue(sequence).remove(sequence)

    # --- turns ------------------------------------------------------------------------------------------------------

    def give_turn(self) -> None:
        """Promote those that came first, of the waiting and of the running, when others were admitted for long enough.

        Among the running it matters too: a prompt under way gets no tokens while better ones keep coming.
        """
        if self._num_admissions < ADMISSIONS_PER_TURN:
            return
        self._num_admissions = 0
        if (waiting := _oldest(self.waiting)) is not None:
            # Out and in again: a promotion changes the sort key, and a sorted list finds nothing under a new key.
            self.waiting.remove(waiting)
            waiting.is_promoted = True
            self.waiting.push(waiting)
        if (running := _oldest(self.running)) is not None:
            self.running.remove(running)
            running.is_promoted = True
            insort(self.running, running, key=order)

    # --- stalled clients --------------------------------------------------------------------------------------------

    def stall(self, client_id: ClientId) -> None:
        """Give a client's sequences no more compute until ``resume``; those that run leave at ``set_stalled_aside``."""
        if client_id not in self._aside:
            aside = self._aside[client_id] = WaitingQueue()
            for sequence in [sequence for sequence in self.waiting if sequence.client_id == client_id]:
                self.waiting.remove(sequence)
                aside.push(sequence)

    def resume(self, client_id: ClientId) -> None:
        """Let the sequences of a client that was stalled go on in the order of their arrival."""
        for sequence in self._aside.pop(client_id, ()):
            self.waiting.push(sequence)

    def set_stalled_aside(self) -> None:
        """Take slots and blocks from the sequences of stalled clients; no plan may be out, as its runner uses them."""
        if self._aside:
            for sequence in [s for s in self.running if s.client_id in self._aside]:
                self.preempt(sequence)

    # --- pauses -----------------------------------------------------------------------------------------------------

    @property
    def has_earlier(self) -> bool:
        """Tell whether a sequence is here that came before the pause; also of a stalled client, which may yet run."""
        return self.can_run or any(self._aside.values())

    def hold(self) -> None:
        """Hold back what arrives from now on; idempotent."""
        self._is_holding = True

    def release(self) -> None:
        """Let what was held back wait like everything else, in the order of arrival; idempotent."""
        self._is_holding = False
        held, self._held = self._held, WaitingQueue()
        for sequence in held:  # not simply to ``waiting``: its client may have stalled meanwhile
            sequence.is_held = False
            self._queue(sequence).push(sequence)

    def _queues(self) -> list[WaitingQueue]:
        return [self.waiting, self._held, *self._aside.values()]

    def _queue(self, sequence: SequenceState) -> WaitingQueue:
        return self._held if sequence.is_held else self._aside.get(sequence.client_id, self.waiting)


def _oldest(sequences: Iterable[SequenceState]) -> SequenceState | None:
    candidates = (sequence for sequence in sequences if not sequence.is_promoted)
    return min(candidates, key=lambda sequence: sequence.arrival, default=None)
