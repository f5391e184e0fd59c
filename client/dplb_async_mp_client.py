"""The client that chooses: every sequence goes to the least loaded engine, and every accepted one ends once."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from client.config import ClientConfig
from client.dp_async_mp_client import DPAsyncMPClient
from client.engine_line import EngineLine
from client.in_flight import InFlight, InFlightTable
from engine.wire.errors import EngineDeadError, OverloadedError, UtilityError
from engine.wire.ids import EngineId
from engine.wire.messages import (
    AbortRequest,
    AddRequest,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    GroupState,
)
from lb.ledger import EngineLedger
from lb.picker import RotatingPicker, only_rank
from lb.views import EngineView

UNKNOWN_POSITION = -1
"""``first_position`` of an end that this client made itself: it does not count tokens."""


class DPLBAsyncMPClient(DPAsyncMPClient):
    """Picks an engine per sequence, keeps the table of what is in flight, and answers for engines that died.

    _candidates: ledgers of the engines that take new sequences, in the order of their ranks.
    """

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config)
        self._in_flight = InFlightTable()
        self._picker = RotatingPicker(config.client_id.index)
        self._candidates: list[EngineLedger] = []

    # --- requests ---

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """Pick an engine and send it one sequence; see the base class. Nothing in here waits."""
        self._ensure_open()
        request.client_id = self.client_id
        return self._place(request, data_parallel_rank).engine_id

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        """Abort requests, all samples of each. Repeated until the engines have applied it; unknown ids are no-ops.

        sample_index: abort this sample alone (its siblings may run on when a stop string ended it).
        """
        self._ensure_open()
        for request_id in request_ids:
            for sequence in self._in_flight.samples(request_id):
                if sample_index in (None, sequence.request.sample_index):
                    self._abort(sequence)

    def _place(self, request: AddRequest, rank: int | None) -> EngineLine:
        """Pick, record, send; an engine whose pipe refuses the message leaves the candidates and another is picked."""
        while True:
            candidates = self._candidates if rank is None else self._only_rank(rank)
            pick = self._picker.pick(candidates, self.num_clients)
            line = self._lines[pick.engine_id]
            entry = line.ledger.add(line.next_seq, request.cost)
            sequence = InFlight(request, line, entry, pinned=rank is not None)
            self._in_flight.add(sequence)
            if self._send_add(line, request):
                return line
            self._in_flight.pop(request.request_id, request.sample_index, request.attempt)
            line.ledger.withdraw(entry)
            self._refresh_candidates()

    def _only_rank(self, rank: int) -> list[EngineLedger]:
        serving = [line.ledger for line in self._by_rank() if not line.leaving]
        only = only_rank(serving, rank)
        return [ledger for ledger in only if ledger in self._candidates]

    def _abort(self, sequence: InFlight) -> None:
        sequence.aborting = True
        request = sequence.request
        self._send(
            sequence.line,
            AbortRequest(self.client_id, 0, request.request_id, request.sample_index, request.attempt),
        )

    # --- outputs ---

    def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take ended sequences out of the table, before the consumer sees the batch.

        Tokens that end nothing cost one comparison each here; that is what keeps the client cheap per token.
        """
        ended = [output for output in outputs.outputs if output.finish_reason is not None]
        if not ended:
            return
        replaced: dict[int, EngineCoreOutput | None] = {}
        for output in ended:
            end = self._on_ended(output, outputs.report_seq)
            if end is not output:
                replaced[id(output)] = end
        if replaced:
            batch = (replaced.get(id(output), output) for output in outputs.outputs)
            outputs.outputs = [output for output in batch if output is not None]

    def _on_ended(self, output: EngineCoreOutput, report_seq: int) -> EngineCoreOutput | None:
        """Return what the consumer shall see in place of an end: the end, another end, or nothing."""
        sequence = self._in_flight.pop(output.request_id, output.sample_index, output.attempt)
        if sequence is None:
            self._counts["unexpected_ends"] += 1
            return None
        sequence.line.ledger.finish(sequence.entry, report_seq)
        if output.finish_reason is FinishReason.REROUTE:
            return self._reroute(sequence)
        return output

    def _reroute(self, sequence: InFlight) -> EngineCoreOutput | None:
        """Pick again for a sequence that its engine took back; None when another engine has it now."""
        self._counts["reroutes"] += 1
        sequence.line.blocked = True
        self._refresh_candidates()
        request = sequence.request
        if sequence.aborting:
            return _end(request, FinishReason.ABORT)
        if sequence.pinned:
            return _end(request, FinishReason.ERROR, f"rank {sequence.line.engine_id.rank} takes no new requests")
        request.attempt += 1
        try:
            self._place(request, None)
        except OverloadedError as error:
            return _end(request, FinishReason.ERROR, str(error))
        return None

    # --- engines ---

    def _on_line_opened(self, line: EngineLine) -> None:
        line.leaving = self._is_leaving(line.engine_id)
        report = self._reports.get(line.engine_id)
        if report is not None:
            line.ledger.on_report(report.report_seq, line.applied, report.load, self._snapshot_at or 0.0)
        super()._on_line_opened(line)
        self._refresh_candidates()

    def _on_line_closed(self, line: EngineLine, reason: str) -> None:
        """Answer for the engine: every sequence it still had gets its one terminal output."""
        self._refresh_candidates()
        lost = self._in_flight.on_line(line)
        message = f"engine {line.engine_id} is gone: {reason}"
        for sequence in lost:
            request = sequence.request
            self._in_flight.pop(request.request_id, request.sample_index, request.attempt)
        if lost:
            ends = [_end(sequence.request, FinishReason.ERROR, message) for sequence in lost]
            self._answers.outputs.put(EngineCoreOutputs(line.engine_id, self.client_id, 0, line.applied, 0, ends))
        self._engines_changed.set()

    def _on_group_state(self, state: GroupState) -> None:
        super()._on_group_state(state)
        self._refresh_candidates()

    def _on_heartbeat(self, now: float) -> None:
        super()._on_heartbeat(now)
        self._refresh_candidates()

    def _refresh_candidates(self) -> None:
        self._candidates = [line.ledger for line in self._by_rank() if not (line.leaving or line.blocked)]

    def _by_rank(self) -> list[EngineLine]:
        return [self._lines[engine_id] for engine_id in sorted(self._lines)]

    def _num_ready(self) -> int:
        return sum(not line.leaving for line in self._lines.values())

    # --- utility calls ---

    async def call_utility_async(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of every engine; return rank -> result.

        Raises:
            UtilityError: it failed on some ranks; holds their reasons and the others' results.
            EngineDeadError: no engine is there.
        """
        self._ensure_open()
        lines = self._by_rank()
        if not lines:
            raise EngineDeadError("no engine is there to call")
        calls = [self._call_engine(line, method, args) for line in lines]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        for line, answer in zip(lines, answers, strict=True):
            rank = line.engine_id.rank
            if isinstance(answer, UtilityError):
                failures[rank] = answer.failures[rank]
            elif isinstance(answer, BaseException):
                failures[rank] = str(answer) or repr(answer)
            else:
                results[rank] = answer
        if failures:
            raise UtilityError(method, failures, results)
        return results

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - part of the call that travels, as the reference has it
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method on the workers of every engine; return the results in the order of the ranks."""
        results = await self.call_utility_async("collective_rpc", method, timeout, list(args), dict(kwargs or {}))
        return [results[rank] for rank in sorted(results)]

    # --- for people and metrics ---

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, one per rank, in the order of the ranks."""
        newest: dict[int, EngineId] = {}
        seats = [seat.engine_id for seat in self._seats.values()]
        gone = [] if self._seats else list(self._gone)  # with seats known, removed ranks are not shown any more
        for engine_id in (*self._lines, *self._reports, *self._refused, *gone, *seats):
            newest[engine_id.rank] = max(engine_id, newest.get(engine_id.rank, engine_id))
        return [self._view(newest[rank]) for rank in sorted(newest)]

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        return {**super().statistics(), "in_flight": len(self._in_flight), "candidates": len(self._candidates)}

    def _view(self, engine_id: EngineId) -> EngineView:
        line = self._lines.get(engine_id)
        seat = self._seats.get(engine_id.rank)
        gone = self._gone.get(engine_id)
        if gone is not None:
            state = "dead"
        elif line is None:
            state = "loading"
        else:
            state = "leaving" if line.leaving else "ready"
        return EngineView(
            engine_id=engine_id,
            state=state,
            reason=gone or self._refused.get(engine_id, ""),
            report=self._reports.get(engine_id),
            ready=line.ready if line else None,
            seat=seat if seat is not None and seat.engine_id == engine_id else None,
            num_in_flight=line.ledger.num_unfinished if line else 0,
            load_score=line.ledger.load(self.num_clients) if line else 0.0,
            num_picks=line.ledger.num_picks if line else 0,
        )


def _end(request: AddRequest, reason: FinishReason, error: str | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request.request_id, request.sample_index, request.attempt, UNKNOWN_POSITION, [], reason, error=error
    )
