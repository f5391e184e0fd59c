"""Sequences that lost their engine: in which order, and how fast, they go to others. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from client.config import MigrationConfig
from client.in_flight import InFlight
from engine.wire.ids import EngineId
from lb.routing.ledger import EngineLedger

TOKENS_PER_LOAD_UNIT = 512
"""So many tokens to compute anew weigh as one more sequence when moves are spread: about one step's prefill."""


class MigrationQueue:
    """Waiting sequences, first come first served, and what each engine computes anew for those it was given.

    A moved sequence costs its engine the prefill of all its tokens. So each engine gets at most ``tokens_in_flight`` of
    them at once, and one longer sequence only alone; the rest waits here until next tokens come.

    Suspects, which may have killed their last engine, come last, and no engine gets two of them at once: when one of
    them does kill it, no innocent one is counted as having died twice in a row beside it. Nor is one that was given to
    an engine which had died together with its last one: before they go on, suspects rest.
    """

    def __init__(self, config: MigrationConfig) -> None:
        self._config = config
        self._trusted: dict[InFlight, None] = {}
        self._suspects: dict[InFlight, None] = {}
        self._tokens: Counter[EngineId] = Counter()
        self._busy_with: dict[EngineId, InFlight] = {}
        self._now = float("-inf")

    def __len__(self) -> int:
        return len(self._trusted) + len(self._suspects)

    def __iter__(self) -> Iterator[InFlight]:
        return chain(self._trusted, self._suspects)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of moved sequences that engines compute anew now."""
        return self._tokens.total()

    def push(self, sequence: InFlight) -> None:
        """Let a sequence wait that no engine has."""
        sequence.waiting_since = None
        (self._suspects if sequence.is_suspect else self._trusted)[sequence] = None

    def acquit(self) -> None:
        """Trust those that wait under suspicion again: what killed their engine was found."""
        for sequence in self._suspects:
            sequence.num_crashes = 0
            self._trusted[sequence] = None
        self._suspects.clear()

    def discard(self, sequence: InFlight) -> None:
        """Forget a sequence, whether or not it waits: it is sent, or its end has come."""
        self._trusted.pop(sequence, None)
        self._suspects.pop(sequence, None)

    def expire(self, now: float) -> list[InFlight]:
        """Return those that have waited too long; those that came since the last call begin to wait now.

        now: monotonic seconds; what a suspect still has to rest counts by it as well.
        """
        self._now = now
        expired = []
        for sequence in self:
            if sequence.waiting_since is None:
                sequence.waiting_since = now
            elif now - sequence.waiting_since >= self._config.timeout_s:
                expired.append(sequence)
        return expired

    def next(self, candidates: Sequence[EngineLedger], num_clients: int) -> tuple[InFlight, EngineId] | None:
        """Return who goes next, and to which engine; None when nobody can go now.

        Whoever comes first is never overtaken for its size, so that it cannot starve.
        """
        for queue in (self._trusted, self._suspects):
            sequence = next(iter(queue), None)
            if sequence is None or self._must_rest(sequence):
                continue
            fitting = [ledger for ledger in candidates if self._has_room(ledger.engine_id, sequence)]
            if fitting:
                return sequence, min(fitting, key=lambda ledger: self._score(ledger, num_clients)).engine_id
        return None

    def on_sent(self, sequence: InFlight, engine_id: EngineId) -> None:
        """Take a sequence out that an engine was given, and count what it computes anew."""
        self.discard(sequence)
        sequence.num_migrated_tokens = sequence.num_tokens
        self._tokens[engine_id] += sequence.num_migrated_tokens
        if sequence.is_suspect:
            self._busy_with[engine_id] = sequence

    def on_caught_up(self, sequence: InFlight, engine_id: EngineId) -> None:
        """Make room: a moved sequence has its next token, its end, or no engine any more."""
        self._tokens[engine_id] -= sequence.num_migrated_tokens
        sequence.num_migrated_tokens = 0
        if not self._tokens[engine_id]:
            del self._tokens[engine_id]
        if self._busy_with.get(engine_id) is sequence:
            del self._busy_with[engine_id]

    def _must_rest(self, sequence: InFlight) -> bool:
        rest_s = self._config.suspect_rest_s
        if not sequence.is_suspect or not rest_s:
            return False
        return sequence.waiting_since is None or self._now - sequence.waiting_since < rest_s

    def _has_room(self, engine_id: EngineId, sequence: InFlight) -> bool:
        if sequence.is_suspect and engine_id in self._busy_with:
            return False
        tokens = self._tokens.get(engine_id, 0)
        return not tokens or tokens + sequence.num_tokens <= self._config.tokens_in_flight

    def _score(self, ledger: EngineLedger, num_clients: int) -> tuple[float, EngineId]:
        tokens = self._tokens.get(ledger.engine_id, 0)
        return ledger.load(num_clients) + tokens / TOKENS_PER_LOAD_UNIT, ledger.engine_id
