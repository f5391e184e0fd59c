"""A histogram that is cheap to feed: one bisection, one list element, one sum."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts of observations by upper bound, the bound included, as Prometheus means it.

    ``prometheus_client.Histogram`` takes a lock and walks its buckets for every observation; this one lives on one
    event loop. bounds: ascending; what is above the last one counts in ``+Inf``.
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count ``weight`` observations of ``value``."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self.total += value * weight

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (upper bound, observations up to it), the last bound being infinity."""
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True))
