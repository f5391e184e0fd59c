"""Token sequences that must not get complete in an output: the last token of one is forbidden behind the others."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """The bad words of one request, by length of what comes before their last token."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """Prepare. words: token ids of each, not empty."""
        self._last: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for *beginning, last in dict.fromkeys(words):
            self._last[len(beginning)][tuple(beginning)].append(last)

    def forbidden(self, token_ids: list[int], num_prompt_tokens: int) -> NDArray[np.int64]:
        """Return the tokens that would complete one; the beginning of a word counts only where it is output."""
        num_output = len(token_ids) - num_prompt_tokens
        found: set[int] = set()
        for length, last in self._last.items():
            if length <= num_output:
                found.update(last.get(tuple(token_ids[len(token_ids) - length :]), ()))
        return np.fromiter(found, dtype=np.int64, count=len(found))
