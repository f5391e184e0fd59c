"""The migration of sequences that lost their engine: their order and pace, the memory it takes, orphans. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct

from client.engine_connection import EngineConnection, Sender
from client.in_flight import InFlight
from engine.wire.ids import EngineId
from engine.wire.messages import AbortRequest, EngineCoreOutput, EngineCoreOutputs
from lb.routing.ledger import EngineLedger

TOKENS_PER_LOAD_UNIT = 512
"""So many tokens to compute anew weigh as one more sequence when moves are spread: about one step's prefill."""

PROMPT_TOKEN_BYTES = 40
"""A place in a list, and the number it points to."""

OUTPUT_TOKEN_BYTES = 4
"""A place in an array."""

CHECK_EVERY_S = 1.0
"""Looking at everybody costs a third of a microsecond each; a tokenizer makes about 50 MB of prompts in that time."""

MAX_REMEMBERED_ORPHANS = 1024


class MigrationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How sequences that lost their engine go on elsewhere.

    tokens_in_flight: tokens of moved sequences that one engine computes anew at once; a single longer one is let
        through when it is the only one. Bounds what a death costs the streams of the engines that are left.
    timeout_s: a sequence that no engine takes for this long ends with an error.
    resume_memory_bytes: what the client keeps to be able to move sequences: prompts and outputs. Beyond it the largest
        sequences are served on, but cannot be moved any more.
    suspect_rest_s: a sequence whose engine died before it had a token of it waits so long for the next one. Engines
        that die in the same moment are known to be gone by then, and are not taken for its doing.
    """

    tokens_in_flight: int = 16_384
    timeout_s: float = 120.0
    resume_memory_bytes: int = 1 << 30
    suspect_rest_s: float = 0.3


class MigrationQueue:
    """Waiting sequences, first come first served, and what each engine computes anew for those it was given.

    A moved sequence costs its engine the prefill of all its tokens. So each engine gets at most ``tokens_in_flight`` of
    them at once, and one longer sequence only alone; the rest waits here until next tokens come.

    Suspects, which may have killed their last engine, come last, and no engine gets two of them at once: when one of
    them does kill it, no innocent one is counted as having died twice in a row beside it. Nor is one that was given to
    an engine which had died together with its last one: before they go on, suspects rest.

    _trusted, _suspects: dicts as ordered sets. _tokens: by engine, what it computes anew. _busy_with: by engine, the
    suspect it has.
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


class ResumeMemory:
    """Keeps what the in-flight table holds below a limit, by giving up the largest sequences first.

    So as few as possible lose their safety, and they are those that would cost another engine most. Samples of one
    request share their prompt, which is counted once.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._next_check = float("-inf")

    def find_excess(self, sequences: Iterable[InFlight], now: float) -> list[InFlight]:
        """Return who must be forgotten now, largest first; looks once a second."""
        if now < self._next_check:
            return []
        self._next_check = now + CHECK_EVERY_S
        sharers = _by_prompt(sequences)
        sizes = [(_size(group), group) for group in sharers]
        excess = sum(size for size, _ in sizes) - self._max_bytes
        forgotten: list[InFlight] = []
        for size, group in sorted(sizes, key=lambda sized: sized[0], reverse=True):
            if excess <= 0:
                break
            forgotten += group  # all of them: as long as one is kept, so is the prompt
            excess -= size
        return forgotten


def _by_prompt(sequences: Iterable[InFlight]) -> list[list[InFlight]]:
    """Return those that can be moved, samples of one prompt together."""
    groups: dict[int, list[InFlight]] = {}
    for sequence in sequences:
        if sequence.can_migrate:
            groups.setdefault(id(sequence.request.prompt_token_ids), []).append(sequence)
    return list(groups.values())


def _size(sharers: list[InFlight]) -> int:
    request = sharers[0].request
    embeds = 0 if request.prompt_embeds is None else request.prompt_embeds.data.nbytes
    outputs = sum(len(sequence.output_ids) for sequence in sharers)
    return OUTPUT_TOKEN_BYTES * outputs + PROMPT_TOKEN_BYTES * len(request.prompt_token_ids) + embeds


class OrphanedRequests:
    """Sequences that engines run for nobody: frees each of them once, since an abort is repeated until it is applied.

    The memory of whom is bounded.
    """

    def __init__(self, connections: Mapping[EngineId, EngineConnection], sender: Sender) -> None:
        self._connections = connections
        self._sender = sender
        self._freed: dict[tuple[int, int, int], None] = {}

    def abort(self, outputs: EngineCoreOutputs, output: EngineCoreOutput) -> None:
        """Let the engine free the sequence of a token that nobody waits for."""
        name = output.request_id, output.sample_index, output.attempt
        connection = self._connections.get(outputs.engine_id)
        if name in self._freed or connection is None:
            return
        self._freed[name] = None
        if len(self._freed) > MAX_REMEMBERED_ORPHANS:
            del self._freed[next(iter(self._freed))]
        self._sender.send(connection, AbortRequest(outputs.client_id, 0, *name))
