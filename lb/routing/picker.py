"""The choice of an engine for a sequence: filter the candidates, score them by load, pick. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.wire.errors import InvalidRequestError, OverloadedError
from engine.wire.ids import EngineId
from lb.routing.ledger import EngineLedger


@dataclass(frozen=True, slots=True)
class Pick:
    """A decision and its grounds, so that "why this rank?" can be answered.

    candidates: engines that were compared. scores: their loads in load units, in the same order.
    """

    engine_id: EngineId
    candidates: Sequence[EngineId]
    scores: Sequence[int]


class RotatingPicker:
    """Takes the least loaded candidate and goes round among equals.

    A cursor, not the loads, decides between equals, so traffic that comes one request at a time visits every rank and
    a new snapshot does not restart the round. Each client starts at its own share of the ring: clients that all
    started at the first rank would pile their first requests there.
    """

    def __init__(self, client_index: int) -> None:
        self._client_index = client_index
        self._next_rank: int | None = None

    def pick(self, candidates: Sequence[EngineLedger], num_clients: int) -> Pick:
        """Choose among candidates, which are in the order of their ranks.

        Raises:
            OverloadedError: there are none.
        """
        if not candidates:
            raise OverloadedError("no engine can take a request now")
        candidates = leave_out_full(candidates)
        scores = [ledger.load(num_clients) for ledger in candidates]
        least = min(scores)
        start = self._start(candidates, num_clients)
        chosen = None
        for ledger, score in zip(candidates, scores, strict=True):
            if score == least:
                if ledger.engine_id.rank >= start:
                    chosen = ledger
                    break
                chosen = chosen or ledger
        assert chosen is not None, "one of them has the least load"
        self._next_rank = chosen.engine_id.rank + 1
        return Pick(chosen.engine_id, [ledger.engine_id for ledger in candidates], scores)

    def _start(self, candidates: Sequence[EngineLedger], num_clients: int) -> int:
        if self._next_rank is not None:
            return self._next_rank
        position = len(candidates) * (self._client_index % num_clients) // num_clients
        return candidates[position].engine_id.rank


def leave_out_full(candidates: Sequence[EngineLedger]) -> Sequence[EngineLedger]:
    """Leave out engines whose sequences wait for the KV cache, as long as another one has room.

    Loads count sequences. Three long ones that fill a cache, and a fourth that waits for it, weigh less than ten short
    ones beside which there is room for a hundred.
    """
    if any(ledger.is_full for ledger in candidates) and any(ledger.has_room for ledger in candidates):
        return [ledger for ledger in candidates if not ledger.is_full]
    return candidates


def only_rank(candidates: Iterable[EngineLedger], rank: int) -> list[EngineLedger]:
    """Keep the candidate the caller asked for; rank 0 is a rank, never "unset".

    Raises:
        InvalidRequestError: no such rank takes requests; the message names those that do.
    """
    valid = list(candidates)
    kept = [ledger for ledger in valid if type(rank) is int and ledger.engine_id.rank == rank]
    if not kept:
        ranks = ", ".join(str(ledger.engine_id.rank) for ledger in valid) or "none at the moment"
        raise InvalidRequestError(
            f"data_parallel_rank {rank!r} takes no requests; valid: {ranks}", "data_parallel_rank"
        )
    return kept
