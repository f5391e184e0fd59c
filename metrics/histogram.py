"""A histogram that is cheap to feed: one bisection, one bucket, one sum."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from metrics.shared_counters import Numbers


class Histogram:
    """Counts of observations by upper bound, the bound included, as Prometheus means it.

    ``prometheus_client.Histogram`` takes a lock and walks its buckets for every observation; this one lives on one
    event loop. bounds: ascending; what is above the last one counts in ``+Inf``. counters: where it lives, of
    ``num_values(bounds)`` numbers; default: memory of its own.
    """

    __slots__ = ("_bounds", "_counters")

    def __init__(self, bounds: Sequence[float], counters: "Numbers | None" = None) -> None:
        self._bounds = tuple(bounds)
        self._counters = [0.0] * self.num_values(bounds) if counters is None else counters

    @staticmethod
    def num_values(bounds: Sequence[float]) -> int:
        """Return how many numbers a histogram with these bounds is: its buckets, ``+Inf`` and the sum."""
        return len(bounds) + 2

    def observe(self, value: float, weight: int = 1) -> None:
        """Count ``weight`` observations of ``value``."""
        counters = self._counters
        counters[bisect_left(self._bounds, value)] += weight
        counters[-1] += value * weight

    @property
    def total(self) -> float:
        """Return the sum of all observed values."""
        return self._counters[-1]

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (upper bound, observations up to it), the last bound being infinity."""
        counts = [int(count) for count in self._counters[:-1]]
        return list(zip((*self._bounds, float("inf")), accumulate(counts), strict=True))
