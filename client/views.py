"""The views of engines: what a client knows of each, gathered for people and metrics. Pure."""

from collections.abc import Iterable, Mapping

from client.engine_connection import EngineConnection
from engine.wire.ids import EngineId
from engine.wire.messages import EngineReport
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EngineState
from lb.views.engine_view import EngineView
from lb.views.totals import RankTotals


def make_views(
    connections: Mapping[EngineId, EngineConnection],
    reports: Mapping[EngineId, EngineReport],
    replicas: Mapping[int, ReplicaInfo],
    gone: Mapping[EngineId, str],
    refused: Mapping[EngineId, str],
    suspects: Mapping[EngineId, str],
    totals: RankTotals,
) -> list[EngineView]:
    """Return one view per rank, of its newest incarnation, in the order of the ranks.

    gone, refused, suspects: why each engine is that.
    Once the replicas are known, a rank without a replica and without a connection was removed and is not shown.
    """
    shown = [*connections, *(replica.engine_id for replica in replicas.values())]
    if not replicas:
        shown += [*reports, *gone, *refused]
    newest = _newest_per_rank(shown)
    views = []
    for engine_id in newest:
        connection = connections.get(engine_id)
        replica = replicas.get(engine_id.rank)
        views.append(
            EngineView(
                engine_id=engine_id,
                state=_state(connection, is_gone=engine_id in gone),
                reason=gone.get(engine_id) or suspects.get(engine_id) or refused.get(engine_id, ""),
                report=reports.get(engine_id),
                ready=connection.ready if connection else None,
                replica=replica if replica is not None and replica.engine_id == engine_id else None,
                num_in_flight=connection.ledger.num_unfinished if connection else 0,
                num_picks=connection.ledger.num_picks if connection else 0,
                totals=totals.of_rank(engine_id.rank),
            )
        )
    return views


def _newest_per_rank(engine_ids: Iterable[EngineId]) -> list[EngineId]:
    newest: dict[int, EngineId] = {}
    for engine_id in sorted(engine_ids):
        newest[engine_id.rank] = engine_id
    return [newest[rank] for rank in sorted(newest)]


def _state(connection: EngineConnection | None, *, is_gone: bool) -> EngineState:
    if is_gone:
        return EngineState.DEAD
    if connection is None:
        return EngineState.LOADING
    if connection.leaving:
        return EngineState.LEAVING
    return EngineState.SUSPECT if connection.suspect else EngineState.READY
