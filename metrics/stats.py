"""What the serving path tells about itself: plain accumulators on one event loop, read at scrape time."""

from collections import Counter

from engine.wire.messages import FinishReason
from metrics.histogram import Histogram

FIRST_TOKEN_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
INTER_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
REQUEST_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
PROMPT_BOUNDS_TOKENS = tuple(4**power for power in range(1, 11))

FINISH_REASONS = tuple(reason.name.lower() for reason in FinishReason if reason is not FinishReason.REROUTE)

_MAX_LABELS = 16
_OTHER = "other"


class RankStats:
    """What one rank has done for this process. Counters only grow, over all incarnations of the rank."""

    __slots__ = ("e2e", "first_token", "inter_token", "num_generated", "num_picks", "num_prompt", "queue_time")

    def __init__(self) -> None:
        self.num_picks = 0
        self.num_prompt = 0
        self.num_generated = 0
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self.queue_time = Histogram(REQUEST_BOUNDS_S)
        self.e2e = Histogram(REQUEST_BOUNDS_S)


class _Ranks(dict[int, RankStats]):
    """Makes a rank's accumulators at its first event. Ranks are seats of the deployment, so they are few."""

    def __missing__(self, rank: int) -> RankStats:
        self[rank] = stats = RankStats()
        return stats


class ServingStats:
    """Accumulators of one API process. Every ``on_*`` runs on its event loop and takes no lock.

    ranks: rank -> accumulators. finished, rejected: reason -> count, with a bounded number of reasons.
    prompt_lengths: tokens of accepted prompts.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, RankStats] = _Ranks()
        self.finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.rejected: Counter[str] = Counter()
        self.prompt_lengths = Histogram(PROMPT_BOUNDS_TOKENS)

    def on_accepted(self, num_prompt_tokens: int) -> None:
        """Count one prompt that was handed to an engine."""
        self.prompt_lengths.observe(num_prompt_tokens)

    def on_picked(self, rank: int) -> None:
        """Count one sequence sent to a rank."""
        self.ranks[rank].num_picks += 1

    def on_rejected(self, reason: str) -> None:
        """Count one request refused at the door. reason: its HTTP status, or a class of them such as ``4xx``."""
        _count(self.rejected, reason)

    def on_first_token(self, rank: int, ttft_s: float, queue_time_s: float | None) -> None:
        """Observe a sequence's first token. queue_time_s: what the engine says it waited, None when it does not."""
        stats = self.ranks[rank]
        stats.first_token.observe(ttft_s)
        if queue_time_s is not None:
            stats.queue_time.observe(queue_time_s)

    def on_tokens(self, rank: int, num_tokens: int) -> None:
        """Count the output tokens of one batch."""
        self.ranks[rank].num_generated += num_tokens

    def on_inter_token(self, rank: int, gap_s: float, num_tokens: int) -> None:
        """Observe ``num_tokens`` >= 1 tokens that came together, ``gap_s`` after the one before: a hot path."""
        self.ranks[rank].inter_token.observe(gap_s / num_tokens, num_tokens)

    def on_finished(self, rank: int, reason: str, e2e_s: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count the end of a sequence.

        Its output tokens were counted as they came. Without any, its prompt tokens do not count either: no engine is
        known to have read them.
        """
        _count(self.finished, reason)
        stats = self.ranks[rank]
        stats.e2e.observe(e2e_s)
        if num_output_tokens:
            stats.num_prompt += num_prompt_tokens


def _count(counter: Counter[str], label: str) -> None:
    """Count a label; those beyond the bound share one, so that no caller can make the exposition grow."""
    counter[label if label in counter or len(counter) < _MAX_LABELS else _OTHER] += 1
