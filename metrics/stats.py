"""The accumulators of the serving path: counters and histograms on one event loop, read at scrape time."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from metrics.shared_counters import Counters, Numbers, PrivateCounters

FIRST_TOKEN_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
INTER_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
REQUEST_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
PROMPT_BOUNDS_TOKENS = tuple(4**power for power in range(1, 11))

FINISH_REASONS = ("stop", "length", "abort", "reject", "error")
"""Why a sequence has ended. reject: it cannot be served as it was asked, wherever; error: something broke."""

MIGRATION_REASONS = ("death", "restart", "gap", "reroute", "planned")
MIGRATION_FAILURES = ("poison", "timeout", "memory")

_MAX_LABELS = 16
_OTHER = "other"
_RANK = "rank/"
_PICKS, _PROMPT, _GENERATED = range(3)


class Histogram:
    """Counts of observations by upper bound, the bound included, as Prometheus means it.

    ``prometheus_client.Histogram`` takes a lock and walks its buckets for every observation; this one lives on one
    event loop. bounds: ascending; what is above the last one counts in ``+Inf``. counters: where it lives,
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


class RankStats:
    """The accumulators of one rank. They only grow, over all incarnations of the rank, and live in ``counters``."""

    __slots__ = ("_counts", "e2e", "first_token", "inter_token", "queue_time")

    def __init__(self, counters: Counters, rank: int) -> None:
        self._counts = counters.run(f"{_RANK}{rank}", 3)
        self.first_token = _histogram(counters, f"first_token/{rank}", FIRST_TOKEN_BOUNDS_S)
        self.inter_token = _histogram(counters, f"inter_token/{rank}", INTER_TOKEN_BOUNDS_S)
        self.queue_time = _histogram(counters, f"queue_time/{rank}", REQUEST_BOUNDS_S)
        self.e2e = _histogram(counters, f"e2e/{rank}", REQUEST_BOUNDS_S)

    @property
    def num_picks(self) -> int:
        """Return how many sequences were sent to the rank."""
        return int(self._counts[_PICKS])

    @property
    def num_prompt(self) -> int:
        """Return the prompt tokens of its ended sequences."""
        return int(self._counts[_PROMPT])

    @property
    def num_generated(self) -> int:
        """Return the output tokens that came from it."""
        return int(self._counts[_GENERATED])

    def on_picked(self) -> None:
        """Count one sequence sent to the rank."""
        self._counts[_PICKS] += 1

    def on_prompt(self, num_tokens: int) -> None:
        """Count the prompt tokens of a sequence that ended."""
        self._counts[_PROMPT] += num_tokens

    def on_generated(self, num_tokens: int) -> None:
        """Count output tokens."""
        self._counts[_GENERATED] += num_tokens


class _Ranks(dict[int, RankStats]):
    """Makes a rank's accumulators at its first event. Ranks come from the deployment, so they are few."""

    def __init__(self, counters: Counters) -> None:
        super().__init__((rank, RankStats(counters, rank)) for rank in map(int, _names_behind(counters, _RANK)))
        self._counters = counters

    def __missing__(self, rank: int) -> RankStats:
        self[rank] = stats = RankStats(self._counters, rank)
        return stats


class LabelCounts(Mapping[str, int]):
    """Label -> count, with a bounded number of labels: those beyond it share one.

    No caller can make the exposition grow. known: labels that are there from the beginning, at 0.
    """

    def __init__(self, counters: Counters, name: str, known: Iterable[str] = ()) -> None:
        self._counters = counters
        self._prefix = f"{name}/"
        labels = {*known, *_names_behind(counters, self._prefix)}
        self._counts = {label: counters.run(self._prefix + label, 1) for label in labels}

    def count(self, label: str, number: int = 1) -> None:
        """Count one, or several."""
        if label not in self._counts and len(self._counts) >= _MAX_LABELS:
            label = _OTHER  # some labels are what a caller sent
        if label not in self._counts:
            self._counts[label] = self._counters.run(self._prefix + label, 1)
        self._counts[label][0] += number

    def __getitem__(self, label: str) -> int:
        """Return the count of a label, 0 when it never came."""
        return int(self._counts[label][0]) if label in self._counts else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


class ServingStats:
    """Accumulators of one API process, or the sums of several. Every ``on_*`` runs on one event loop, without a lock.

    counters: where they live; default: in this process alone. Numbers that are in there already go on from where they
        stand.
    ranks: rank -> accumulators. finished, rejected: by reason. prompt_lengths: tokens of accepted prompts.
    migrations, migration_failures: sequences that lost their engine and went to another, by what took it from them; and
        those that did not get there, by why.
    """

    def __init__(self, counters: Counters | None = None) -> None:
        counters = PrivateCounters() if counters is None else counters
        self.ranks: dict[int, RankStats] = _Ranks(counters)
        self.finished = LabelCounts(counters, "finished", FINISH_REASONS)
        self.rejected = LabelCounts(counters, "rejected")
        self.migrations = LabelCounts(counters, "migrations", MIGRATION_REASONS)
        self.migration_failures = LabelCounts(counters, "migration_failures", MIGRATION_FAILURES)
        self.prompt_lengths = _histogram(counters, "prompt_lengths", PROMPT_BOUNDS_TOKENS)

    def on_accepted(self, num_prompt_tokens: int) -> None:
        """Count one prompt that was handed to an engine."""
        self.prompt_lengths.observe(num_prompt_tokens)

    def on_picked(self, rank: int) -> None:
        """Count one sequence sent to a rank."""
        self.ranks[rank].on_picked()

    def on_rejected(self, reason: str) -> None:
        """Count one request refused on arrival. reason: its HTTP status, or a class of them such as ``4xx``."""
        self.rejected.count(reason)

    def on_first_token(self, rank: int, ttft_s: float, queue_time_s: float | None) -> None:
        """Observe a sequence's first token. queue_time_s: how long it waited in the engine, None if unknown."""
        stats = self.ranks[rank]
        stats.first_token.observe(ttft_s)
        if queue_time_s is not None:
            stats.queue_time.observe(queue_time_s)

    def on_tokens(self, rank: int, num_tokens: int) -> None:
        """Count the output tokens of one batch."""
        self.ranks[rank].on_generated(num_tokens)

    def on_inter_token(self, rank: int, gap_s: float, num_tokens: int) -> None:
        """Observe ``num_tokens`` >= 1 tokens that came together, ``gap_s`` after the one before: a hot path."""
        self.ranks[rank].inter_token.observe(gap_s / num_tokens, num_tokens)

    def on_finished(self, rank: int, reason: str, e2e_s: float, num_prompt_tokens: int) -> None:
        """Count the end of a sequence, whose output tokens were counted as they came.

        rank: -1 when it was not sent to any. num_prompt_tokens: those that an engine has read, 0 when none did.
        """
        self.finished.count(reason)
        if rank >= 0:
            stats = self.ranks[rank]
            stats.e2e.observe(e2e_s)
            stats.on_prompt(num_prompt_tokens)


def _histogram(counters: Counters, name: str, bounds: Sequence[float]) -> Histogram:
    return Histogram(bounds, counters.run(name, Histogram.num_values(bounds)))


def _names_behind(counters: Counters, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in counters.names() if name.startswith(prefix)]
