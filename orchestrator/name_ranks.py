"""Ranks as people read them, in messages of the API and of the command line."""

from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 2"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
