"""The client that chooses: every sequence goes to the least loaded engine, and every accepted one ends once."""

from collections.abc import Mapping, Sequence
from typing import Any

from client.config import ClientConfig
from client.dispatcher import Dispatcher
from client.dp_async_mp_client import DPAsyncMPClient
from client.engine_connection import EngineConnection
from client.sequences import MigrationReason
from client.utility_calls import gather_ranks
from client.views import make_views
from engine.wire.errors import EngineDeadError
from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, EngineCoreOutputs, GroupState
from lb.routing.picker import RotatingPicker
from lb.views.engine_view import EngineView
from lb.views.totals import RankTotals

_NO_ENGINE = EngineId(0, 0)


class DPLBAsyncMPClient(DPAsyncMPClient):
    """Picks an engine per sequence, calls all engines at once, and moves the sequences of engines that died.

    What decides is in the dispatcher. Everything that may leave a sequence without an engine, or make room for one,
    comes by the output task, the state task or the heartbeat, and each of them lets the dispatcher send on.
    """

    def __init__(self, config: ClientConfig, totals: RankTotals | None = None) -> None:
        super().__init__(config, totals)
        picker = RotatingPicker(config.client_id.index)
        self._dispatcher = Dispatcher(self._connections, picker, self._sender, self._counts, config.migrations)

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """Pick an engine and send it one sequence; see the base class. Nothing in here waits."""
        self._ensure_open()
        request.client_id = self.client_id
        engine_id = self._dispatcher.route(request, data_parallel_rank).engine_id
        self._wake_idle_group()
        return engine_id

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        """Abort requests, all samples of each. Repeated until the engines have applied it; unknown ids are no-ops.

        sample_index: abort this sample alone: a stop string, which engines do not know, ends one and not its siblings.
        """
        self._ensure_open()
        for request_id in request_ids:
            self._dispatcher.abort(request_id, sample_index)
        self._deliver_ends()

    def migrate_from(self, engine_id: EngineId, reason: str) -> None:
        """Move what an engine has to the others, though it lives; for who frees it without waiting for its streams.

        An engine that is unknown has nothing. Take it out of the candidates first (cordon it, or let it leave).
        """
        connection = self._connections.get(engine_id)
        if connection is not None:
            self._dispatcher.migrate_from(connection, reason)
            self._send_on()

    async def call_utility_async(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of every engine; return rank -> result.

        Raises:
            UtilityError: it failed on some ranks; holds their reasons and the others' results.
            EngineDeadError: no engine is there.
        """
        return await self.call_ranks_async(method, args)

    async def call_ranks_async(
        self,
        method: str,
        args: Sequence[Any] = (),
        timeout_s: float | None = None,
    ) -> dict[int, Any]:
        """Call a method of every engine as ``call_utility_async`` does, and wait so long at most for each answer."""
        self._ensure_open()
        connections = [self._connections[engine_id] for engine_id in sorted(self._connections)]
        if not connections:
            raise EngineDeadError("no engine is there to call")
        calls = {connection.engine_id.rank: self._call_engine(connection, method, args) for connection in connections}
        return await gather_ranks(method, calls, timeout_s)

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
            self._connections,
            self._reports,
            self._replicas,
            self._gone,
            self._refused,
            self._suspects,
            totals=self._totals,
        )

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = {
            "in_flight": len(self._dispatcher.in_flight),
            "waiting_to_move": self._dispatcher.num_waiting,
            "unmovable": self._dispatcher.num_unmigratable,
            "candidates": self._dispatcher.num_candidates,
        }
        return {**super().statistics(), **held}

    def _num_ready(self) -> int:
        return sum(not connection.leaving for connection in self._connections.values())

    def _on_connection_opened(self, connection: EngineConnection) -> None:
        self._update_status(connection)
        self._dispatcher.refresh()
        super()._on_connection_opened(connection)

    def _on_connection_closed(self, connection: EngineConnection, reason: str, *, restarted: bool) -> None:
        """Let what the engine had go on elsewhere. One that was to leave and died before it was let go has died."""
        gone = MigrationReason.PLANNED if connection.dismissed else MigrationReason.DEATH
        why = MigrationReason.RESTART if restarted else gone
        self._dispatcher.on_connection_closed(connection, f"engine {connection.engine_id}: {reason}", why)
        self._pending.engines_changed.set()

    def _on_output_gap(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        """Resume what the lost frames may have spoken of: tokens are missing, or an end that will not be said again."""
        super()._on_output_gap(connection, outputs)
        self._dispatcher.on_outputs_lost(
            connection, outputs, f"outputs of engine {connection.engine_id} were lost on their way"
        )

    def _on_inbox(self) -> None:
        super()._on_inbox()
        self._send_on()

    def _on_group_state(self, state: GroupState) -> None:
        super()._on_group_state(state)
        self._dispatcher.num_clients = self.num_clients
        self._dispatcher.refresh()
        for replica in state.replicas:
            connection = self._connections.get(replica.engine_id)
            if connection is not None and replica.is_migrating:
                self._dispatcher.migrate_from(connection, f"engine {replica.engine_id} is leaving")
        self._send_on()

    def _on_heartbeat(self, now: float) -> None:
        super()._on_heartbeat(now)
        self._dispatcher.refresh()
        self._dispatcher.on_time(now)
        self._send_on()

    def _send_on(self) -> None:
        """Let waiting sequences go on where there is room, and tell the consumer of ends that no engine will tell."""
        self._dispatcher.send_waiting()
        self._deliver_ends()

    def _deliver_ends(self) -> None:
        ends = self._dispatcher.take_ends()
        if ends:
            # No engine says this; the name in front of a batch matters for the tokens in it, and there are none.
            self._pending.outputs.put(EngineCoreOutputs(_NO_ENGINE, self.client_id, 0, 0, 0, ends))
