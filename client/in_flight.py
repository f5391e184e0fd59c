"""The sequences a client has sent and not seen the end of."""

from dataclasses import dataclass

from client.engine_line import EngineLine
from engine.wire.messages import AddRequest
from lb.ledger import LedgerEntry


@dataclass(slots=True, eq=False)
class InFlight:
    """One unfinished sequence.

    entry: its place in the ledger of ``line``, the engine that has it. pinned: the caller chose the rank, so it is
    never moved to another one. aborting: its end was asked for.
    """

    request: AddRequest
    line: EngineLine
    entry: LedgerEntry
    pinned: bool
    aborting: bool = False


class InFlightTable:
    """Unfinished sequences by request id and sample index. A sequence is in it exactly until its terminal output."""

    def __init__(self) -> None:
        self._samples: dict[int, dict[int, InFlight]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, sequence: InFlight) -> None:
        """Record a sequence before its ADD is sent."""
        request = sequence.request
        samples = self._samples.setdefault(request.request_id, {})
        assert request.sample_index not in samples, "a sequence is in flight once"
        samples[request.sample_index] = sequence
        self._count += 1

    def get(self, request_id: int, sample_index: int) -> InFlight | None:
        """Return one sequence, or None when it is not in flight."""
        samples = self._samples.get(request_id)
        return samples.get(sample_index) if samples else None

    def remove(self, sequence: InFlight) -> None:
        """Take out a sequence that is in the table."""
        request = sequence.request
        samples = self._samples[request.request_id]
        del samples[request.sample_index]
        if not samples:
            del self._samples[request.request_id]
        self._count -= 1

    def samples(self, request_id: int) -> list[InFlight]:
        """Return the unfinished sequences of one request."""
        return list(self._samples.get(request_id, {}).values())

    def on_line(self, line: EngineLine) -> list[InFlight]:
        """Return the unfinished sequences one engine has."""
        return [seq for samples in self._samples.values() for seq in samples.values() if seq.line is line]
