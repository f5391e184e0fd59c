"""What a client received and did not use: counted by kind, logged once per kind and peer."""

import logging
from collections import Counter

_log = logging.getLogger(__name__)

MAX_REMEMBERED_PEERS = 256


class Drops:
    """Counts what is dropped. The memory of who was logged is bounded; peers beyond it are counted only."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def drop(self, kind: str, peer: str, detail: str = "") -> None:
        """Count one dropped thing of this kind (a key of the client's statistics) from this peer."""
        self.counts[kind] += 1
        if (kind, peer) not in self._logged and len(self._logged) < MAX_REMEMBERED_PEERS:
            self._logged.add((kind, peer))
            _log.warning("dropped %s from %s%s", kind.replace("_", " "), peer, f": {detail}" if detail else "")
