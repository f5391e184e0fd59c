"""The routing of a client: where its sequences go, and what happens to them when an engine comes, dies or leaves."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable

from client.connection_table import Closed, ConnectionTable
from client.dispatcher import Dispatcher
from client.engine_connection import EngineConnection, Sender
from client.mailbox import PendingResults
from client.migration import MigrationConfig
from client.sequences import MigrationReason
from engine.wire.errors import InvalidRequestError, OverloadedError
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import AbortRequest, AddRequest, EngineCoreOutputs
from lb.routing.picker import RotatingPicker

NO_ENGINE = EngineId(0, 0)
MADE_HERE = 0
"""``out_seq`` of a batch of ends that no engine sent; theirs count from 1."""


class Routing(ABC):
    """What a client does about its engines' coming and going; one implementation for one engine, one for many.

    The client reports each event once. Everything that may leave a sequence without an engine, or make room for one,
    is followed by ``settle``.
    """

    def __init__(self, engines: ConnectionTable, results: PendingResults) -> None:
        """Begin. engines: kept by the client. results: what the callers of the client wait for."""
        self._engines = engines
        self._results = results

    @abstractmethod
    def route(self, request: AddRequest, rank: int | None) -> EngineId:
        """Send one sequence to an engine and return which; does not wait.

        Raises:
            InvalidRequestError: no such rank takes requests. OverloadedError: no engine can take it now.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[int], sample_index: int | None = None) -> None:
        """Ask for the end of requests: of one sample each, or of all (None). Unknown ones are no-ops."""

    @abstractmethod
    def on_opened(self, connection: EngineConnection) -> None:
        """Take a new engine."""

    @abstractmethod
    def on_closed(self, closed: Closed) -> None:
        """Take the end of a connection: its engine has died, was let go, or began anew."""

    def on_outputs_lost(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        """Take the news that frames before ``outputs`` are lost; answers of utility calls may have been in them."""
        reason = "outputs were lost on their way, the answer perhaps with them"
        self._results.calls.fail_engine(connection.engine_id, reason)

    @abstractmethod
    def on_group_changed(self, num_clients: int, migrating: Iterable[EngineConnection]) -> None:
        """Take a new group state, which may have changed who takes requests.

        num_clients: live clients of the deployment. migrating: see ``GroupChange``.
        """

    @abstractmethod
    def on_time(self, now: float) -> None:
        """Act on what has waited too long; a few times a second. now: monotonic seconds."""

    @abstractmethod
    def settle(self) -> None:
        """Let waiting sequences go on where there is room, and give the consumer ends that no engine will send."""

    def statistics(self) -> dict[str, int]:
        """Return sizes of what is held now."""
        return {}


class SingleEngineRouting(Routing):
    """Everything goes to the one engine there is; its end is the client's. Tracks no sequence."""

    def __init__(self, client_id: ClientId, engines: ConnectionTable, sender: Sender, results: PendingResults) -> None:
        super().__init__(engines, results)
        self._client_id = client_id
        self._sender = sender

    def route(self, request: AddRequest, rank: int | None) -> EngineId:
        """Send one sequence; see the base class."""
        connection = self._engines.only()
        engine_id = connection.engine_id
        if rank not in (None, engine_id.rank):
            raise InvalidRequestError(
                f"data_parallel_rank {rank!r} takes no requests; valid: {engine_id.rank}", "data_parallel_rank"
            )
        if not self._sender.send_add(connection, request):
            raise OverloadedError(f"engine {engine_id} takes no request now")
        return engine_id

    def abort(self, request_ids: Iterable[int], sample_index: int | None = None) -> None:
        """Abort requests of one sample each, or this sample."""
        connection = self._engines.only()
        for request_id in request_ids:
            abort = AbortRequest(self._client_id, 0, request_id, sample_index=sample_index or 0, attempt=0)
            self._sender.send(connection, abort)

    def on_opened(self, connection: EngineConnection) -> None:
        """Nothing waited for it here."""

    def on_closed(self, closed: Closed) -> None:
        """End the client: with its one engine gone, nothing more will come."""
        self._results.end(closed.reason, closed.connection.engine_id)

    def on_group_changed(self, num_clients: int, migrating: Iterable[EngineConnection]) -> None:
        """Nothing to choose from, and nowhere to migrate to."""

    def on_time(self, now: float) -> None:
        """Nothing waits here."""

    def settle(self) -> None:
        """Nothing waits here."""


class BalancedRouting(Routing):
    """Every sequence goes to the least loaded engine; one that loses its engine goes on with another, and ends once.

    What decides is in the pure ``Dispatcher``; here are the events around it, the same whether engines are reached
    over sockets or live in threads.

    dispatcher: for the outputs of engines, which come too often for one more call in between.
    """

    def __init__(
        self,
        client_id: ClientId,
        engines: ConnectionTable,
        sender: Sender,
        results: PendingResults,
        counts: Counter[str],
        migrations: MigrationConfig,
        *,
        engines_are_replaced: bool = True,
    ) -> None:
        """Begin. engines_are_replaced: somebody starts another engine in place of one that died."""
        super().__init__(engines, results)
        self._client_id = client_id
        self._engines_are_replaced = engines_are_replaced
        picker = RotatingPicker(client_id.index)
        self.dispatcher = Dispatcher(engines.connections, picker, sender, counts, migrations)

    def route(self, request: AddRequest, rank: int | None) -> EngineId:
        """Pick an engine and send it one sequence; see the base class."""
        return self.dispatcher.route(request, rank).engine_id

    def abort(self, request_ids: Iterable[int], sample_index: int | None = None) -> None:
        """Abort requests, wherever their samples are; repeated until the engines have applied it."""
        for request_id in request_ids:
            self.dispatcher.abort(request_id, sample_index)
        self._deliver_ends()

    def on_opened(self, connection: EngineConnection) -> None:
        """Let the new engine be picked."""
        self.dispatcher.refresh()

    def on_closed(self, closed: Closed) -> None:
        """End the calls to an engine that is gone, or began anew, and let its sequences go on with others.

        An engine that was to leave and died before it was let go has died.
        """
        connection = closed.connection
        engine_id = connection.engine_id
        self._results.calls.fail_engine(engine_id, closed.reason)
        if closed.restarted:
            why = MigrationReason.RESTART
        else:
            why = MigrationReason.PLANNED if connection.dismissed else MigrationReason.DEATH
        self.dispatcher.on_connection_closed(connection, f"engine {engine_id}: {closed.reason}", why)
        if not self._engines_are_replaced:
            self._end_what_risks_too_much()

    def _end_what_risks_too_much(self) -> None:
        """End waiting sequences that may kill the last engine as they did another: all prompts would go with it."""
        num_left = len(self._engines.connections)
        if num_left == 0:
            self.dispatcher.end_waiting("no engine is left")
        elif num_left == 1:
            reason = "it may be the reason and is not tried on the last engine"
            self.dispatcher.end_waiting(reason, suspects_only=True)

    def on_outputs_lost(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        """Resume what the lost frames may have spoken of: tokens are missing, or an end that will not be sent again."""
        super().on_outputs_lost(connection, outputs)
        reason = f"outputs of engine {connection.engine_id} were lost on their way"
        self.dispatcher.on_outputs_lost(connection, outputs, reason)

    def on_group_changed(self, num_clients: int, migrating: Iterable[EngineConnection]) -> None:
        """Count the clients anew, look anew at who takes requests, and free the engines that are to be freed."""
        self.dispatcher.num_clients = num_clients
        self.dispatcher.refresh()
        for connection in migrating:
            self.dispatcher.migrate_from(connection, f"engine {connection.engine_id} is leaving")

    def migrate_from(self, engine_id: EngineId, reason: str) -> None:
        """Move what an engine has to the others, though it lives. One that is unknown has nothing."""
        connection = self._engines.connections.get(engine_id)
        if connection is not None:
            self.dispatcher.migrate_from(connection, reason)
            self.settle()

    def on_time(self, now: float) -> None:
        """Look anew at who takes requests, and at what has waited too long or takes too much memory."""
        self.dispatcher.refresh()
        self.dispatcher.on_time(now)

    def settle(self) -> None:
        """See the base class."""
        self.dispatcher.send_waiting()
        self._deliver_ends()

    def _deliver_ends(self) -> None:
        if ends := self.dispatcher.take_ends():
            # No engine sent this; the name in front of a batch matters for the tokens in it, and there are none.
            self._results.deliver(EngineCoreOutputs(NO_ENGINE, self._client_id, MADE_HERE, 0, 0, ends))

    def statistics(self) -> dict[str, int]:
        """See the base class."""
        return {
            "in_flight": len(self.dispatcher.in_flight),
            "waiting_to_move": self.dispatcher.num_waiting,
            "unmovable": self.dispatcher.num_unmigratable,
            "candidates": self.dispatcher.num_candidates,
        }
