"""The dispatcher of sequences to engines: picks, outputs, moves and ends. Pure but for the sender it is given."""

from array import array
from collections import Counter
from collections.abc import Mapping

from client.engine_connection import EngineConnection, Sender
from client.in_flight import InFlight, Placement
from client.migration import MigrationConfig, MigrationQueue, OrphanedRequests, ResumeMemory
from client.sequences import MigrationReason, Sequences
from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, EngineCoreOutput, EngineCoreOutputs, ErrorKind, FinishReason
from lb.routing.ledger import EngineLedger
from lb.routing.picker import RotatingPicker, only_rank


class Dispatcher:
    """Gives every accepted sequence to one engine at a time, and exactly one end.

    connections: the engines there are, kept by the client; it calls ``refresh`` when one comes, goes, or changes
    whether it takes requests, and ``send_waiting`` after whatever may have left a sequence without an engine or made
    room for one.
    num_clients: live clients of the deployment, this one included.

    Always true between two calls: each sequence of the in-flight table is either placed on a connection there is, and
    in its ledger, or in the queue of those that wait to be moved. ``output_ids`` are the tokens the consumer was given,
    in order and without a hole: an output of another attempt, or one that begins elsewhere, is dropped.
    """

    def __init__(
        self,
        connections: Mapping[EngineId, EngineConnection],
        picker: RotatingPicker,
        sender: Sender,
        counts: Counter[str],
        config: MigrationConfig | None = None,
    ) -> None:
        self.num_clients = 1
        self._config = config or MigrationConfig()
        self._migrations = MigrationQueue(self._config)
        self._memory = ResumeMemory(self._config.resume_memory_bytes)
        self._sequences = Sequences(connections, self._migrations, sender, counts)
        self._orphans = OrphanedRequests(connections, sender)
        self._connections = connections
        self._picker = picker
        self._counts = counts
        self.in_flight = self._sequences.table

    @property
    def num_candidates(self) -> int:
        """Return how many engines take requests now."""
        return len(self._sequences.candidates)

    @property
    def num_waiting(self) -> int:
        """Return how many sequences wait to be moved."""
        return len(self._migrations)

    @property
    def num_unmigratable(self) -> int:
        """Return how many sequences an engine's death would end, because what it takes to resume them is not kept."""
        return sum(not sequence.can_migrate for sequence in self.in_flight.by_name.values())

    def refresh(self) -> None:
        """Work out anew which engines take requests."""
        self._sequences.refresh()

    def take_ends(self) -> list[EngineCoreOutput]:
        """Return the terminal outputs that were made here since the last call, to be given to the consumer."""
        ends, self._sequences.ends = self._sequences.ends, []
        return ends

    # --- what callers ask for ---------------------------------------------------------------------------------------

    def route(self, request: AddRequest, rank: int | None = None) -> EngineConnection:
        """Pick, record, send: an answer can never come for a sequence that is not in the table.

        An engine whose pipe refuses the message is no candidate for a while, and another one is picked.

        Raises:
            InvalidRequestError: no such rank takes requests. OverloadedError: no engine can take it now.
        """
        sequence = InFlight(request, pinned=rank is not None)
        if request.output_token_ids:
            sequence.output_ids = array("i", request.output_token_ids)
        self.in_flight.add(sequence)
        try:
            while True:  # ends: whoever refuses is blocked and no candidate any more, and a pick among none raises
                candidates = self._sequences.candidates if rank is None else self._only(rank)
                connection = self._connections[self._picker.pick(candidates, self.num_clients).engine_id]
                if self._sequences.dispatch(sequence, connection, request):
                    return connection
        except BaseException:
            self.in_flight.remove(sequence)
            raise

    def abort(self, request_id: int, sample_index: int | None = None) -> None:
        """Ask for the end of a request: one sample, or all of them (None).

        What is unknown is a no-op, and so is asking twice: the message is repeated until the engine has applied it. One
        that waits to be moved ends at once.
        """
        for sequence in self.in_flight.samples(request_id):
            if sequence.aborting or sample_index not in (None, sequence.request.sample_index):
                continue
            sequence.aborting = True
            if sequence.placement is None:
                self._sequences.end(sequence, FinishReason.ABORT)
            else:
                self._sequences.send_abort(sequence.placement.connection, sequence.request)

    # --- what engines send ------------------------------------------------------------------------------------------

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Note new tokens and ends before the consumer sees the batch, and take out of it what is not for it.

        The one loop of this room over tokens. What goes on where its last output ended costs a look-up, three
        comparisons and an append.
        """
        find = self.in_flight.by_name.get
        dropped: set[int] = set()  # by identity: outputs compare by value, and two may be equal
        for output in outputs.outputs:
            sequence = find((output.request_id, output.sample_index))
            if (
                sequence is None
                or output.attempt != sequence.request.attempt
                or output.first_position != len(sequence.output_ids)
            ):
                dropped.add(id(output))
                self._on_unexpected(outputs, sequence, output)
                continue
            token_ids = output.new_token_ids
            try:
                if len(token_ids) == 1:  # half the time of extending
                    sequence.output_ids.append(token_ids[0])
                else:
                    sequence.output_ids.extend(token_ids)
            except OverflowError:  # no token id has more than 32 bits
                dropped.add(id(output))
                self._on_absurd(sequence)
                continue
            if sequence.num_migrated_tokens and output.new_token_ids:
                self._sequences.catch_up(sequence)
                sequence.num_crashes = 0  # no longer a suspect: it has a token of this engine
            if output.finish_reason is not None and not self._on_ended(sequence, output, outputs.report_seq):
                dropped.add(id(output))
        if dropped:
            outputs.outputs = [output for output in outputs.outputs if id(output) not in dropped]

    def on_connection_closed(
        self, connection: EngineConnection, reason: str, why: MigrationReason = MigrationReason.DEATH
    ) -> None:
        """Take what an engine that is gone, or began anew, still had; it is moved, or gets its end."""
        self.refresh()  # first: none of it may go back where it came from
        for sequence, placement in self.in_flight.on_connection(connection):
            self._sequences.requeue(sequence, placement, why, reason)

    def on_outputs_lost(self, connection: EngineConnection, outputs: EngineCoreOutputs, reason: str) -> None:
        """Move the sequences that frames lost before ``outputs`` may have spoken of.

        Those the engine has not applied yet have had no output. The others are aborted there; what it still sends of
        them is of another attempt.
        """
        placed = self.in_flight.on_connection(connection)
        lost = [(sequence, at) for sequence, at in placed if at.entry.channel_seq <= outputs.applied]
        self._sequences.take_away(lost, MigrationReason.GAP, outputs.report_seq, reason)

    def migrate_from(self, connection: EngineConnection, reason: str) -> None:
        """Move everything an engine has, which lives and goes on: it is to be freed without waiting for its streams."""
        placed = self.in_flight.on_connection(connection)
        # No output frame tells from which report on they are not counted any more: the next one is the best guess.
        self._sequences.take_away(placed, MigrationReason.PLANNED, connection.ledger.report_seq + 1, reason)

    # --- moving -----------------------------------------------------------------------------------------------------

    def send_waiting(self) -> None:
        """Give as many waiting sequences to engines as these take now."""
        while self._migrations:
            step = self._migrations.next(self._sequences.candidates, self.num_clients)
            if step is None:
                return
            sequence, engine_id = step
            if self._sequences.dispatch(sequence, self._connections[engine_id], sequence.resumption()):
                self._migrations.on_sent(sequence, engine_id)

    def on_time(self, now: float) -> None:
        """End those that have waited too long for an engine, and keep to the memory limit; a few times a second."""
        for sequence in self._memory.find_excess(self.in_flight.by_name.values(), now):
            self._counts["forgotten_sequences"] += 1
            sequence.forget()
            if sequence.placement is None:
                self._sequences.end_forgotten(sequence, sequence.lost_by)
        limit = f"no other engine took it for {self._config.timeout_s:g} s (--move-timeout)"
        for sequence in self._migrations.expire(now):
            self._counts["timeout_ends"] += 1
            self._sequences.end(sequence, FinishReason.ERROR, f"{sequence.lost_by}; {limit}")

    def end_waiting(self, reason: str, *, suspects_only: bool = False) -> None:
        """End those that wait for an engine, or those of them that may have killed their last one."""
        for sequence in list(self._migrations):
            if sequence.is_suspect or not suspects_only:
                self._sequences.end(sequence, FinishReason.ERROR, f"{sequence.lost_by}; {reason}")

    def _only(self, rank: int) -> list[EngineLedger]:
        valid = [connection.ledger for connection in self._sequences.by_rank() if connection.is_open]
        return [ledger for ledger in only_rank(valid, rank) if ledger in self._sequences.candidates]

    # --- ends -------------------------------------------------------------------------------------------------------

    def _on_ended(self, sequence: InFlight, output: EngineCoreOutput, report_seq: int) -> bool:
        """Take an end; False when there is nothing in it for the consumer.

        An engine merges what waits for a slow client, so tokens may come with a REROUTE: to the consumer these are all.
        """
        placement = sequence.placement
        if placement is not None:
            placement.connection.ledger.finish(placement.entry, report_seq)
            self._sequences.catch_up(sequence)
        if output.finish_reason is FinishReason.REROUTE:
            output.finish_reason = None
            if placement is not None:
                self._reroute(sequence, placement)
            return bool(output.new_token_ids)
        if placement is None:  # none of our engines can end an attempt that was not sent yet; whoever does is believed
            self._migrations.discard(sequence)
        self.in_flight.remove(sequence)
        return True

    def _reroute(self, sequence: InFlight, placement: Placement) -> None:
        """Take back a sequence from an engine that takes nothing new."""
        engine_id = placement.connection.engine_id
        placement.connection.blocked = True
        self.refresh()
        untouched = not sequence.output_ids and sequence.request.attempt == 0
        if sequence.pinned and untouched and not sequence.aborting:
            # Nothing shows that it was accepted, and whoever names a rank is never silently given another.
            error = f"rank {engine_id.rank} takes no new requests"
            self._sequences.end(sequence, FinishReason.ERROR, error, ErrorKind.REQUEST)
        else:
            reason = f"engine {engine_id} takes nothing new"
            self._sequences.requeue(sequence, placement, MigrationReason.REROUTE, reason)

    def _on_unexpected(self, outputs: EngineCoreOutputs, sequence: InFlight | None, output: EngineCoreOutput) -> None:
        """Drop an output that nobody waits for. A hole in the tokens of the current attempt moves the sequence."""
        self._counts["unexpected_outputs"] += 1
        if sequence is None:
            if output.finish_reason is None:
                self._orphans.abort(outputs, output)
            return
        placement = sequence.placement
        if placement is None or sequence.request.attempt != output.attempt:
            return
        is_its_engine = placement.connection.engine_id == outputs.engine_id
        if is_its_engine and output.first_position > len(sequence.output_ids):
            lost = [(sequence, placement)]
            reason = "its outputs were lost on their way"
            self._sequences.take_away(lost, MigrationReason.GAP, outputs.report_seq, reason)

    def _on_absurd(self, sequence: InFlight) -> None:
        """End a sequence whose engine answered with tokens that cannot be."""
        if sequence.placement is not None:
            connection, entry, _ = sequence.placement
            self._sequences.send_abort(connection, sequence.request)
            connection.ledger.finish(entry, 0)
        self._sequences.end(sequence, FinishReason.ERROR, "its engine answered with a token that does not exist")
