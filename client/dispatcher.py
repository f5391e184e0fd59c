"""Which engine has which sequence: picks, the in-flight table and the ends. Pure but for the sender it is given."""

from collections import Counter
from collections.abc import Mapping

from client.engine_line import EngineLine
from client.in_flight import InFlight, InFlightTable
from client.sender import Sender
from engine.wire.errors import OverloadedError
from engine.wire.ids import EngineId
from engine.wire.messages import AbortRequest, AddRequest, EngineCoreOutput, EngineCoreOutputs, FinishReason
from lb.ledger import EngineLedger
from lb.picker import RotatingPicker, only_rank

UNKNOWN_POSITION = -1
"""``first_position`` of an end that the client made itself: it does not count tokens."""


class Dispatcher:
    """Gives every accepted sequence to one engine at a time, and exactly one end.

    lines: the engines there are, kept by the client; it calls ``refresh`` when one comes, goes, or changes whether it
    takes requests. num_clients: live clients of the deployment, this one included.

    Always true between two calls: the ledgers' unfinished sequences are those of the in-flight table, and each of
    those is on a line there is. Candidates are the ledgers of lines that are neither leaving nor blocked, by rank.
    """

    def __init__(
        self, lines: Mapping[EngineId, EngineLine], picker: RotatingPicker, sender: Sender, counts: Counter[str]
    ) -> None:
        self.num_clients = 1
        self.in_flight = InFlightTable()
        self._lines = lines
        self._picker = picker
        self._sender = sender
        self._counts = counts
        self._candidates: list[EngineLedger] = []

    @property
    def num_candidates(self) -> int:
        """Return how many engines take requests now."""
        return len(self._candidates)

    def refresh(self) -> None:
        """Work out anew which engines take requests."""
        self._candidates = [line.ledger for line in self._by_rank() if not (line.leaving or line.blocked)]

    def place(self, request: AddRequest, rank: int | None = None) -> EngineLine:
        """Pick, record, send: an answer can never come for a sequence that is not in the table.

        An engine whose pipe refuses the message is no candidate for a while, and another one is picked.

        Raises:
            InvalidRequestError: no such rank takes requests. OverloadedError: no engine can take it now.
        """
        while True:
            candidates = self._candidates if rank is None else self._only(rank)
            line = self._lines[self._picker.pick(candidates, self.num_clients).engine_id]
            sequence = InFlight(request, line, line.ledger.add(line.next_seq, request.cost), pinned=rank is not None)
            self.in_flight.add(sequence)
            if self._sender.send_add(line, request):
                return line
            self.in_flight.remove(sequence)
            line.ledger.withdraw(sequence.entry)
            self.refresh()

    def abort(self, request_id: int, sample_index: int | None = None) -> None:
        """Ask for the end of a request: one sample, or all of them (None).

        What is unknown is a no-op, and so is asking twice: the line repeats the message until it is applied.
        """
        for sequence in self.in_flight.samples(request_id):
            request = sequence.request
            if sequence.aborting or sample_index not in (None, request.sample_index):
                continue
            self._send_abort(sequence)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take ended sequences out of the table, before the consumer sees the batch.

        Tokens that end nothing cost one comparison each here; that is what keeps the client cheap per token.
        """
        ended = [output for output in outputs.outputs if output.finish_reason is not None]
        replaced: dict[int, EngineCoreOutput | None] = {}
        for output in ended:
            end = self._on_ended(output, outputs.report_seq)
            if end is not output:
                replaced[id(output)] = end
        if replaced:
            batch = (replaced.get(id(output), output) for output in outputs.outputs)
            outputs.outputs = [output for output in batch if output is not None]

    def on_line_closed(self, line: EngineLine, reason: str) -> list[EngineCoreOutput]:
        """Return one terminal output for every sequence that an engine which is gone still had."""
        self.refresh()
        lost = self.in_flight.on_line(line)
        for sequence in lost:
            self.in_flight.remove(sequence)
        return [_end(sequence.request, FinishReason.ERROR, reason) for sequence in lost]

    def on_outputs_lost(self, line: EngineLine, outputs: EngineCoreOutputs, reason: str) -> list[EngineCoreOutput]:
        """Return one terminal output for every sequence that frames lost before ``outputs`` may have spoken of.

        Those the engine has not applied yet have had no output. The others are aborted there; what it still says of
        them finds nobody.
        """
        lost = [seq for seq in self.in_flight.on_line(line) if seq.entry.line_seq <= outputs.applied]
        for sequence in lost:
            if not sequence.aborting:
                self._send_abort(sequence)
            self.in_flight.remove(sequence)
            line.ledger.finish(sequence.entry, outputs.report_seq)
        return [_end(sequence.request, FinishReason.ERROR, reason) for sequence in lost]

    def _send_abort(self, sequence: InFlight) -> None:
        sequence.aborting = True
        request = sequence.request
        message = AbortRequest(request.client_id, 0, request.request_id, request.sample_index, request.attempt)
        self._sender.send(sequence.line, message)

    def _only(self, rank: int) -> list[EngineLedger]:
        serving = [line.ledger for line in self._by_rank() if not line.leaving]
        return [ledger for ledger in only_rank(serving, rank) if ledger in self._candidates]

    def _by_rank(self) -> list[EngineLine]:
        return [self._lines[engine_id] for engine_id in sorted(self._lines)]

    def _on_ended(self, output: EngineCoreOutput, report_seq: int) -> EngineCoreOutput | None:
        """Return what the consumer shall see in place of an end: the end, another end, or nothing."""
        sequence = self.in_flight.get(output.request_id, output.sample_index)
        if sequence is None or sequence.request.attempt != output.attempt:
            self._counts["unexpected_ends"] += 1
            return None
        self.in_flight.remove(sequence)
        sequence.line.ledger.finish(sequence.entry, report_seq)
        return self._reroute(sequence) if output.finish_reason is FinishReason.REROUTE else output

    def _reroute(self, sequence: InFlight) -> EngineCoreOutput | None:
        """Pick again for a sequence that its engine gave back; return its end when that cannot be."""
        self._counts["reroutes"] += 1
        sequence.line.blocked = True
        self.refresh()
        request = sequence.request
        if sequence.aborting:
            return _end(request, FinishReason.ABORT)
        if sequence.pinned:
            return _end(request, FinishReason.ERROR, f"rank {sequence.line.engine_id.rank} takes no new requests")
        request.attempt += 1
        try:
            self.place(request)
        except OverloadedError as error:
            return _end(request, FinishReason.ERROR, str(error))
        return None


def _end(request: AddRequest, reason: FinishReason, error: str | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request.request_id, request.sample_index, request.attempt, UNKNOWN_POSITION, [], reason, error=error
    )
