"""What a client knows of every engine, gathered for people and metrics."""

from collections.abc import Iterable, Mapping

from client.engine_line import EngineLine
from engine.wire.ids import EngineId
from engine.wire.messages import EngineReport, Seat
from lb.totals import RankTotals
from lb.views import EngineState, EngineView


def make_views(
    lines: Mapping[EngineId, EngineLine],
    reports: Mapping[EngineId, EngineReport],
    seats: Mapping[int, Seat],
    gone: Mapping[EngineId, str],
    refused: Mapping[EngineId, str],
    suspects: Mapping[EngineId, str],
    num_clients: int,
    totals: RankTotals,
) -> list[EngineView]:
    """Return one view per rank, of its newest incarnation, in the order of the ranks.

    gone, refused, suspects: why each engine is that.
    Once the seats are known, a rank without a seat and without a line was removed and is not shown.
    """
    shown = [*lines, *(seat.engine_id for seat in seats.values())]
    if not seats:
        shown += [*reports, *gone, *refused]
    newest = _newest_per_rank(shown)
    views = []
    for engine_id in newest:
        line = lines.get(engine_id)
        seat = seats.get(engine_id.rank)
        views.append(
            EngineView(
                engine_id=engine_id,
                state=_state(line, is_gone=engine_id in gone),
                reason=gone.get(engine_id) or suspects.get(engine_id) or refused.get(engine_id, ""),
                report=reports.get(engine_id),
                ready=line.ready if line else None,
                seat=seat if seat is not None and seat.engine_id == engine_id else None,
                num_in_flight=line.ledger.num_unfinished if line else 0,
                load_score=line.ledger.load(num_clients) if line else 0,
                num_picks=line.ledger.num_picks if line else 0,
                totals=totals.of_rank(engine_id.rank),
            )
        )
    return views


def _newest_per_rank(engine_ids: Iterable[EngineId]) -> list[EngineId]:
    newest: dict[int, EngineId] = {}
    for engine_id in sorted(engine_ids):
        newest[engine_id.rank] = engine_id
    return [newest[rank] for rank in sorted(newest)]


def _state(line: EngineLine | None, *, is_gone: bool) -> EngineState:
    if is_gone:
        return EngineState.DEAD
    if line is None:
        return EngineState.LOADING
    if line.leaving:
        return EngineState.LEAVING
    return EngineState.SUSPECT if line.suspect else EngineState.READY
