"""Which line has which sequence: put on, taken off, left to wait, ended. Pure but for the sender it is given."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from client.engine_connection import EngineConnection
from client.in_flight import InFlight, InFlightTable
from client.migrations import MigrationQueue
from client.sender import Sender
from engine.wire.ids import EngineId
from engine.wire.messages import AbortRequest, AddRequest, EngineCoreOutput, ErrorKind, FinishReason
from lb.routing.ledger import EngineLedger

UNKNOWN_POSITION = -1
"""``first_position`` of an end that the client made itself."""

MAX_CRASHES = 2
"""So many engines in a row that died before a sequence had a token of them, and it is taken for the reason."""


class MigrationReason(StrEnum):
    """Why a sequence goes to another engine; ``moves_<reason>`` counts them. Only a death can be its own doing."""

    DEATH = "death"
    RESTART = "restart"
    GAP = "gap"
    REROUTE = "reroute"
    PLANNED = "planned"


class Sequences:
    """Every unfinished sequence, either on a line there is, and in its ledger, or in the queue of those that wait.

    table: all of them. moves: those that wait. candidates: ledgers of the engines that take requests, by rank.
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
        """Return the lines in the order of their ranks."""
        return [self._connections[engine_id] for engine_id in sorted(self._connections)]

    def dispatch(self, sequence: InFlight, connection: EngineConnection, message: AddRequest) -> bool:
        """Record a sequence on a line and send it; False when the line does not take it, and nothing is recorded."""
        sequence.connection = connection
        sequence.entry = connection.ledger.add(connection.next_seq)
        sequence.num_before = len(sequence.output_ids)
        accepted = False
        try:
            accepted = self._sender.send_add(connection, message)
        finally:  # also when it cannot be encoded
            if not accepted:
                connection.ledger.withdraw(sequence.entry)
                sequence.entry = None
                self.refresh()
        return accepted

    def send_abort(self, sequence: InFlight) -> None:
        """Ask the engine that has a sequence to free it."""
        assert sequence.connection is not None, "it was sent"
        request = sequence.request
        message = AbortRequest(request.client_id, 0, request.request_id, request.sample_index, request.attempt)
        self._sender.send(sequence.connection, message)

    def take_away(
        self,
        connection: EngineConnection,
        sequences: Iterable[InFlight],
        why: MigrationReason,
        report_seq: int,
        reason: str,
    ) -> None:
        """Free sequences on an engine that lives, and let them go on elsewhere. report_seq: see ``finish``."""
        for sequence in sequences:
            assert sequence.entry is not None, "it is on the line"
            if not sequence.aborting:
                self.send_abort(sequence)
            connection.ledger.finish(sequence.entry, report_seq)
            self.requeue(sequence, why, reason)

    def requeue(self, sequence: InFlight, why: MigrationReason, reason: str) -> None:
        """Let a sequence whose line is done with it wait for another engine, unless this is its end."""
        self.catch_up(sequence)
        sequence.entry = None
        if why is MigrationReason.DEATH:
            has_new_tokens = len(sequence.output_ids) > sequence.num_before
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
            sequence.request.attempt += 1
            sequence.lost_by = reason
            self.migrations.push(sequence)

    def catch_up(self, sequence: InFlight) -> None:
        """Note that a moved sequence costs its engine no recomputation any more."""
        if sequence.num_migrated_tokens and sequence.connection is not None:
            self.migrations.on_caught_up(sequence, sequence.connection.engine_id)

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
        """Give a sequence that no line has an end made here."""
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


_POISON = (
    "two engines in a row died before this request produced a token on them, so it is not tried again; the last one: {}"
)
