"""The table of sequences that a client has sent and not seen the end of, and what it takes to resume each. Pure."""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from client.engine_connection import EngineConnection
from engine.wire.messages import AddRequest
from lb.routing.ledger import LedgerEntry


class TokenCount:
    """The tokens of a sequence that is not kept: how many there are."""

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def append(self, token_id: int) -> None:
        """Count one."""
        self._count += 1

    def extend(self, token_ids: list[int]) -> None:
        """Count more tokens."""
        self._count += len(token_ids)


def _no_tokens() -> "array[int]":
    return array("i")


class Placement(NamedTuple):
    """Where a sequence is: its engine, its entry in that engine's ledger, and the tokens it came there with."""

    connection: EngineConnection
    entry: LedgerEntry
    num_tokens: int


@dataclass(slots=True, eq=False)
class InFlight:
    """One unfinished sequence.

    request: as the caller gave it, but for ``attempt``, which is that of the engine that has it.
    pinned: the caller chose the rank. That decides where it is admitted; to survive, it is moved like any other.
    placement: the engine that has it; None while it waits for one.
    output_ids: its tokens so far, over all attempts; an array, because it holds them ten times as densely as a list.
        Only their number once the sequence was forgotten.
    num_crashes: engines in a row that died before it had a token of them.
    num_migrated_tokens: tokens its engine computes anew before its next one; 0 once that has come.
    waiting_since: when it was found waiting (monotonic seconds). lost_by: what took its last engine from it.
    aborting: its end was asked for.
    """

    request: AddRequest
    pinned: bool
    placement: Placement | None = None
    output_ids: "array[int] | TokenCount" = field(default_factory=_no_tokens)
    num_crashes: int = 0
    num_migrated_tokens: int = 0
    waiting_since: float | None = None
    lost_by: str = ""
    aborting: bool = False

    @property
    def num_tokens(self) -> int:
        """Return the tokens an engine must have computed before the next one."""
        return len(self.request.prompt_token_ids) + len(self.output_ids)

    @property
    def is_suspect(self) -> bool:
        """Tell whether its last engine died before it had a token of it: it may be what killed it."""
        return self.num_crashes > 0

    @property
    def can_migrate(self) -> bool:
        """Tell whether what it takes to resume it is kept."""
        return not isinstance(self.output_ids, TokenCount)

    def forget(self) -> None:
        """Give up what it takes to resume it; it is served on by the engine that has it."""
        self.request = replace(self.request, prompt_token_ids=[], prompt_embeds=None)
        self.output_ids = TokenCount(len(self.output_ids))

    def resumption(self) -> AddRequest:
        """Return what the next engine gets: it goes on behind the tokens there are.

        Prompt log-probabilities came with the first token; they are not asked for again, which would also keep the
        prompt from being taken out of the prefix cache.
        """
        request = self.request
        assert not isinstance(self.output_ids, TokenCount), "a forgotten sequence cannot be resumed"
        if not self.output_ids:
            return replace(request)
        sampling = replace(request.sampling, num_prompt_logprobs=None)
        return replace(request, output_token_ids=self.output_ids.tolist(), sampling=sampling)


class InFlightTable:
    """Unfinished sequences by request id and sample index. A sequence is in it exactly until its terminal output.

    by_name: the same, for the one loop that looks at every output.
    """

    def __init__(self) -> None:
        self.by_name: dict[tuple[int, int], InFlight] = {}
        self._samples: dict[int, list[InFlight]] = {}

    def __len__(self) -> int:
        return len(self.by_name)

    def add(self, sequence: InFlight) -> None:
        """Record a sequence before its ADD is sent."""
        request = sequence.request
        name = request.request_id, request.sample_index
        assert name not in self.by_name, "a sequence is in flight once"
        self.by_name[name] = sequence
        self._samples.setdefault(request.request_id, []).append(sequence)

    def get(self, request_id: int, sample_index: int) -> InFlight | None:
        """Return one sequence, or None when it is not in flight."""
        return self.by_name.get((request_id, sample_index))

    def remove(self, sequence: InFlight) -> None:
        """Take out a sequence that is in the table."""
        request = sequence.request
        del self.by_name[request.request_id, request.sample_index]
        samples = self._samples[request.request_id]
        samples.remove(sequence)
        if not samples:
            del self._samples[request.request_id]

    def samples(self, request_id: int) -> list[InFlight]:
        """Return the unfinished sequences of one request."""
        return list(self._samples.get(request_id, ()))

    def on_connection(self, connection: EngineConnection) -> list[tuple[InFlight, Placement]]:
        """Return the unfinished sequences one engine has, and where each is placed there."""
        placed = [(sequence, sequence.placement) for sequence in self.by_name.values()]
        return [(sequence, at) for sequence, at in placed if at is not None and at.connection is connection]
