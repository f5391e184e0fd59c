"""Which clients live: what they said last, and when."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.wire.ids import ClientId
from engine.wire.messages import ClientInfo, ClientReport

MAX_CLIENTS = 1024


@dataclass(slots=True)
class _Record:
    report: ClientReport
    heard_at: float
    listed: bool


class ClientRegistry:
    """Lists a client from its first report until it leaves, its process ends, or it has been silent for too long.

    One record per client index, newest (incarnation, report_seq) wins. Records of clients that left are kept, so that
    a late report does not bring one back.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._records: dict[int, _Record] = {}

    def on_report(self, report: ClientReport, now: float) -> bool:
        """Take one report; True when the list changed."""
        client_id = report.info.client_id
        known = self._records.get(client_id.index)
        if known is None and len(self._records) >= MAX_CLIENTS:
            return False
        if known is not None and _order(report) <= _order(known.report):
            return False
        before = known.report.info if known is not None and known.listed else None
        record = _Record(report, now, listed=not report.leaving)
        self._records[client_id.index] = record
        return (report.info if record.listed else None) != before

    def on_gone(self, client_ids: Iterable[ClientId]) -> bool:
        """Take out clients whose process ended; True when the list changed."""
        changed = False
        for client_id in client_ids:
            record = self._records.get(client_id.index)
            if record is not None and record.listed and record.report.info.client_id == client_id:
                record.listed = False
                changed = True
        return changed

    def expire(self, now: float) -> bool:
        """Take out clients that are silent for too long; True when the list changed. A later report lists them again.

        Silence of a client costs it its place, because engines must not compute for nobody; silence of an engine
        never declares a death.
        """
        changed = False
        for record in self._records.values():
            if record.listed and now - record.heard_at > self._silence_s:
                record.listed = False
                changed = True
        return changed

    def next_expiry(self) -> float:
        """Return when ``expire`` may next have something to do; infinity without clients."""
        heard = [record.heard_at for record in self._records.values() if record.listed]
        return min(heard) + self._silence_s if heard else float("inf")

    def live(self) -> list[ClientInfo]:
        """Return the listed clients in the order of their index."""
        return [self._records[index].report.info for index in sorted(self._records) if self._records[index].listed]


def _order(report: ClientReport) -> tuple[int, int]:
    return report.info.client_id.incarnation, report.report_seq
