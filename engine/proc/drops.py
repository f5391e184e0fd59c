"""Messages that are no business of ours: counted, named once per peer, dropped."""

import logging
from collections import Counter

_MAX_NAMED_PEERS = 1000

log = logging.getLogger(__name__)


class Drops:
    """Counts dropped messages by reason; each peer is logged once, so that a scanner cannot fill the disk."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._named: set[str] = set()

    def add(self, peer: str, reason: str, detail: object = "") -> None:
        """Count one dropped message."""
        self._counts[reason] += 1
        if peer not in self._named and len(self._named) < _MAX_NAMED_PEERS:
            self._named.add(peer)
            log.warning("dropping messages from %s: %s %s", peer, reason, detail)

    def statistics(self) -> dict[str, int]:
        """Return reason -> messages dropped."""
        return dict(self._counts)
