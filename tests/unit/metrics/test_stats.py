"""What each event on the serving path adds."""

from metrics.stats import ServingStats


def observations(stats: ServingStats, rank: int, name: str) -> int:
    return int(getattr(stats.ranks[rank], name).cumulative()[-1][1])


def test_tokens_that_come_together_share_their_gap() -> None:
    stats = ServingStats()
    stats.on_inter_token(0, gap_s=0.040, num_tokens=4)
    counts = dict(stats.ranks[0].inter_token.cumulative())
    assert (counts[0.005], counts[0.01]) == (0, 4)
    assert stats.ranks[0].inter_token.total == 0.040


def test_a_first_token_without_a_queue_time_observes_none() -> None:
    stats = ServingStats()
    stats.on_first_token(2, 0.1, None)
    stats.on_first_token(2, 0.1, 0.01)
    assert observations(stats, 2, "first_token") == 2
    assert observations(stats, 2, "queue_time") == 1


def test_prompt_tokens_count_once_an_engine_has_read_them() -> None:
    stats = ServingStats()
    stats.on_finished(0, "stop", 1.0, num_prompt_tokens=10)
    stats.on_finished(0, "abort", 0.1, num_prompt_tokens=0)
    assert stats.ranks[0].num_prompt == 10
    assert observations(stats, 0, "e2e") == 2
    assert (stats.finished["stop"], stats.finished["abort"], stats.finished["error"]) == (1, 1, 0)


def test_what_was_sent_to_no_rank_counts_for_none() -> None:
    stats = ServingStats()
    stats.on_finished(-1, "abort", 0.1, num_prompt_tokens=0)
    assert stats.finished["abort"] == 1
    assert not stats.ranks


def test_unforeseen_reasons_cannot_grow_the_label_set() -> None:
    stats = ServingStats()
    for number in range(1_000):
        stats.on_rejected(f"status {number}")
    assert len(stats.rejected) <= 17
    assert sum(stats.rejected.values()) == 1_000
    stats.on_rejected("status 0")
    assert stats.rejected["status 0"] == 2
