"""The steps of a sequence's life at a client: sent, taken away, requeued, ended. Pure but for its sender."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from client.engine_connection import EngineConnection, Sender
from client.in_flight import InFlight, InFlightTable, Placement
from client.migration import MigrationQueue
from engine.wire.ids import EngineId
from engine.wire.messages import AbortRequest, AddRequest, EngineCoreOutput, ErrorKind, FinishReason
from lb.routing.ledger import EngineLedger

UNKNOWN_POSITION = -1
"""``first_position`` of an end that the client made itself."""

MAX_CRASHES = 2
"""So many engines in a row that died before a sequence had a token of them, and it is taken for the reason."""

_POISON = (
    "two engines in a row died before this request produced a token on them, so it is not tried again; the last one: {}"
)


class MigrationReason(StrEnum):
    """Why a sequence goes to another engine; ``moves_<reason>`` counts them. Only a death can be its own doing."""

    DEATH = "death"
    RESTART = "restart"
    GAP = "gap"
    REROUTE = "reroute"
    PLANNED = "planned"


class Sequences:
    """Every unfinished sequence, either with an engine and in its ledger, or in the queue of those that wait for one.

    table: all of them. migrations: those that wait. candidates: ledgers of the engines that take requests, by rank.
    ends: terminal outputs made here and not yet taken by the consumer.
    """

    def __init__(
        self,
        connections: Mapping[EngineId, EngineConnection],
        migrations: MigrationQueue,
        sender: Sender,
        counts: Counter[str],
    ) -> None:
        self.table = InFlightTable()
        self.migrations = migrations
        self.candidates: list[EngineLedger] = []
        self.ends: list[EngineCoreOutput] = []
        self._connections = connections
        self._sender = sender
        self._counts = counts

    def refresh(self) -> None:
        """Work out anew which engines take requests."""
        self.candidates = [connection.ledger for connection in self.by_rank() if connection.takes_requests]

    def by_rank(self) -> list[EngineConnection]:
        """Return the connections in the order of their ranks."""
        return [self._connections[engine_id] for engine_id in sorted(self._connections)]

    def dispatch(self, sequence: InFlight, connection: EngineConnection, message: AddRequest) -> bool:
        """Record a sequence in an engine's ledger and send it; False when it is not taken, and nothing is recorded."""
        # Recorded first: its answer cannot come for a sequence that is nowhere.
        entry = connection.ledger.add(connection.next_seq)
        sequence.placement = Placement(connection, entry, len(sequence.output_ids))
        accepted = False
        try:
            accepted = self._sender.send_add(connection, message)
        finally:  # also when it cannot be encoded
            if not accepted:
                connection.ledger.withdraw(entry)
                sequence.placement = None
                self.refresh()
        return accepted

    def send_abort(self, connection: EngineConnection, request: AddRequest) -> None:
        """Ask an engine to free a sequence that it has."""
        name = request.request_id, request.sample_index, request.attempt
        self._sender.send(connection, AbortRequest(request.client_id, 0, *name))

    # --- losing an engine -------------------------------------------------------------------------------------------

    def take_away(
        self, placed: Iterable[tuple[InFlight, Placement]], why: MigrationReason, report_seq: int, reason: str
    ) -> None:
        """Free sequences on engines that live, and let them go on elsewhere.

        report_seq: of the first report that will not count them any more, see ``EngineLedger.finish``.
        """
        for sequence, placement in placed:
            if not sequence.aborting:
                self.send_abort(placement.connection, sequence.request)
            placement.connection.ledger.finish(placement.entry, report_seq)
            self.requeue(sequence, placement, why, reason)

    def requeue(self, sequence: InFlight, lost: Placement, why: MigrationReason, reason: str) -> None:
        """Let a sequence whose engine is done with it wait for another one, unless this is its end."""
        self.catch_up(sequence)
        sequence.placement = None
        if why is MigrationReason.DEATH:
            has_new_tokens = len(sequence.output_ids) > lost.num_tokens
            sequence.num_crashes = 0 if has_new_tokens else sequence.num_crashes + 1
        if sequence.aborting:
            self.end(sequence, FinishReason.ABORT)
        elif sequence.num_crashes >= MAX_CRASHES:
            self._counts["poison_ends"] += 1
            self.migrations.acquit()
            self.end(sequence, FinishReason.ERROR, _POISON.format(reason))
        elif not sequence.can_migrate:
            self.end_forgotten(sequence, reason)
        else:
            self._counts[f"moves_{why}"] += 1
            # Whatever the last engine still sends of it is of another attempt from now on, and dropped.
            sequence.request.attempt += 1
            sequence.lost_by = reason
            self.migrations.push(sequence)

    def catch_up(self, sequence: InFlight) -> None:
        """Note that a moved sequence costs its engine no recomputation any more."""
        if sequence.num_migrated_tokens and sequence.placement is not None:
            self.migrations.on_caught_up(sequence, sequence.placement.connection.engine_id)

    # --- ends -------------------------------------------------------------------------------------------------------

    def end_forgotten(self, sequence: InFlight, reason: str) -> None:
        """End one that would have to be moved and cannot be."""
        self._counts["memory_ends"] += 1
        error = f"{reason}; to go on elsewhere it was too large to be kept (--resume-memory)"
        self.end(sequence, FinishReason.ERROR, error)

    def end(
        self,
        sequence: InFlight,
        reason: FinishReason,
        error: str | None = None,
        error_kind: ErrorKind = ErrorKind.ENGINE,
    ) -> None:
        """Give a sequence that no engine will end an end made here."""
        self.catch_up(sequence)
        self.migrations.discard(sequence)
        self.table.remove(sequence)
        request = sequence.request
        self.ends.append(
            EngineCoreOutput(
                request.request_id,
                request.sample_index,
                request.attempt,
                UNKNOWN_POSITION,
                [],
                reason,
                error=error,
                error_kind=error_kind,
            )
        )
