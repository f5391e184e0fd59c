"""The restart rule: whether, and how soon, something that ended is started again. Pure."""

from dataclasses import dataclass

MAX_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """Bounds of restarting one thing.

    max_in_row: restarts without ``settled_s`` of service in between; 0: none at all. settled_s: what served this long
    did not end because of its start, and begins a new row. first_pause_s: before the second restart in a row; there is
    none before the first, and each later one is twice as long, up to 30 s.
    """

    max_in_row: int
    settled_s: float = 60.0
    first_pause_s: float = 1.0


class Restarts:
    """The restarts of one thing: an engine's replica, an API process, the coordinator. Times are monotonic seconds.

    num_in_row: restarts since it last served for long enough.
    """

    def __init__(self, rule: RestartRule) -> None:
        self.rule = rule
        self.num_in_row = 0
        self._serving_since: float | None = None

    def on_serving(self, now: float) -> None:
        """Note that it serves; repeated calls change nothing."""
        if self._serving_since is None:
            self._serving_since = now

    def on_end(self, now: float) -> float | None:
        """Take its end; return the seconds to wait before it is started again, None when it is not."""
        since, self._serving_since = self._serving_since, None
        if since is not None and now - since >= self.rule.settled_s:
            self.num_in_row = 0
        if self.num_in_row >= self.rule.max_in_row:
            return None
        self.num_in_row += 1
        # The first restart is immediate: most ends are single, and a crash loop shows only at the second.
        if self.num_in_row == 1:
            return 0.0
        return float(min(MAX_PAUSE_S, self.rule.first_pause_s * 2 ** (self.num_in_row - 2)))
