"""The client that chooses: every sequence goes to the least loaded engine, and every accepted one ends once."""

from collections.abc import Mapping, Sequence
from typing import Any

from client.config import ClientConfig
from client.dispatcher import Dispatcher
from client.dp_async_mp_client import DPAsyncMPClient
from client.engine_line import EngineLine
from client.utility_calls import gather_ranks
from client.views import make_views
from engine.wire.errors import EngineDeadError
from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, EngineCoreOutput, EngineCoreOutputs, GroupState
from lb.picker import RotatingPicker
from lb.totals import RankTotals
from lb.views import EngineView


class DPLBAsyncMPClient(DPAsyncMPClient):
    """Picks an engine per sequence, calls all engines at once, and answers for engines that died.

    An engine's death ends only what was in flight on it. What decides is in the dispatcher.
    """

    def __init__(self, config: ClientConfig, totals: RankTotals | None = None) -> None:
        super().__init__(config, totals)
        picker = RotatingPicker(config.client_id.index)
        self._dispatcher = Dispatcher(self._lines, picker, self._sender, self._counts)

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """Pick an engine and send it one sequence; see the base class. Nothing in here waits."""
        self._ensure_open()
        request.client_id = self.client_id
        return self._dispatcher.place(request, data_parallel_rank).engine_id

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        """Abort requests, all samples of each. Repeated until the engines have applied it; unknown ids are no-ops.

        sample_index: abort this sample alone: a stop string, which engines do not know, ends one and not its siblings.
        """
        self._ensure_open()
        for request_id in request_ids:
            self._dispatcher.abort(request_id, sample_index)

    async def call_utility_async(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of every engine; return rank -> result.

        Raises:
            UtilityError: it failed on some ranks; holds their reasons and the others' results.
            EngineDeadError: no engine is there.
        """
        self._ensure_open()
        lines = [self._lines[engine_id] for engine_id in sorted(self._lines)]
        if not lines:
            raise EngineDeadError("no engine is there to call")
        return await gather_ranks(
            method, {line.engine_id.rank: self._call_engine(line, method, args) for line in lines}
        )

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - it travels to the engines; the caller may add its own
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method on the workers of every engine; return the results in the order of the ranks."""
        results = await self.call_utility_async("collective_rpc", method, timeout, list(args), dict(kwargs or {}))
        return [results[rank] for rank in sorted(results)]

    def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Let the dispatcher see a batch before the consumer does."""
        self._dispatcher.on_outputs(outputs)

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, one per rank, in the order of the ranks."""
        return make_views(
            self._lines, self._reports, self._seats, self._gone, self._refused, self.num_clients, self._totals
        )

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = {"in_flight": len(self._dispatcher.in_flight), "candidates": self._dispatcher.num_candidates}
        return {**super().statistics(), **held}

    def _num_ready(self) -> int:
        return sum(not line.leaving for line in self._lines.values())

    def _on_line_opened(self, line: EngineLine) -> None:
        line.leaving = self._is_leaving(line.engine_id)
        self._dispatcher.refresh()
        super()._on_line_opened(line)

    def _on_line_closed(self, line: EngineLine, reason: str) -> None:
        """Answer for the engine: every sequence it still had gets its one terminal output."""
        self._answer_for(line, self._dispatcher.on_line_closed(line, f"engine {line.engine_id} is gone: {reason}"))
        self._answers.engines_changed.set()

    def _on_output_gap(self, line: EngineLine, outputs: EngineCoreOutputs) -> None:
        """End what the lost frames may have spoken of: tokens are missing, or an end that will not be said again."""
        reason = f"outputs of engine {line.engine_id} were lost on their way"
        self._answer_for(line, self._dispatcher.on_outputs_lost(line, outputs, reason))

    def _answer_for(self, line: EngineLine, ends: list[EngineCoreOutput]) -> None:
        if ends:
            self._answers.outputs.put(EngineCoreOutputs(line.engine_id, self.client_id, 0, line.applied, 0, ends))

    def _on_group_state(self, state: GroupState) -> None:
        super()._on_group_state(state)
        self._dispatcher.num_clients = self.num_clients
        self._dispatcher.refresh()

    def _on_heartbeat(self, now: float) -> None:
        super()._on_heartbeat(now)
        self._dispatcher.refresh()
