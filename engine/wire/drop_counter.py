"""The counter of messages that were received and dropped: by kind, with one log line per kind and peer."""

import logging
from collections import Counter

MAX_NAMED_PEERS = 1000

_log = logging.getLogger(__name__)


class DropCounter:
    """Counts what is dropped. The memory of what was logged is bounded, so that a port scanner cannot fill the disk.

    counts: kind -> how often. Written by the one thread that receives; other threads may read it approximately.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._named: set[tuple[str, str]] = set()

    def drop(self, kind: str, peer: str, detail: object = "") -> None:
        """Count one dropped thing. kind: a key of the room's statistics. peer: who sent it, as far as that is known."""
        self.counts[kind] += 1
        if (kind, peer) not in self._named and len(self._named) < MAX_NAMED_PEERS:
            self._named.add((kind, peer))
            text = f": {detail}" if detail else ""
            _log.warning("dropped %s from %s%s; more of that is only counted", kind.replace("_", " "), peer, text)
