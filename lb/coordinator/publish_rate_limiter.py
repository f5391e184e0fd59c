"""When a state that is published whole is due again."""


class PublishRateLimiter:
    """Publishes a change soon, a state that is not observed yet often, and an unchanged one now and then.

    All gaps are seconds since the last publication. min_gap_s: also a change waits this long, so that a storm of
    changes costs a bounded number of messages. repeat_gap_s: while not everybody has observed the state.
    max_gap_s: when all is quiet.
    """

    def __init__(self, *, min_gap_s: float, max_gap_s: float, repeat_gap_s: float | None = None) -> None:
        self._min_gap_s = min_gap_s
        self._max_gap_s = max_gap_s
        self._repeat_gap_s = max_gap_s if repeat_gap_s is None else repeat_gap_s
        self._published_at = float("-inf")
        self._published_version = -1

    def due_at(self, version: int, *, observed: bool = True) -> float:
        """Return when the state of this version is due; at or before now means now."""
        if version != self._published_version:
            return self._published_at + self._min_gap_s
        return self._published_at + (self._max_gap_s if observed else self._repeat_gap_s)

    def on_published(self, version: int, now: float) -> None:
        """Note that the state of this version went out."""
        self._published_version = version
        self._published_at = now

    def on_new_subscriber(self) -> None:
        """Make the state due as if it had changed: somebody subscribed who has nothing yet."""
        self._published_version = -1
