"""How much memory may be spent on being able to move sequences, and who is given up when it is not enough. Pure."""

from collections.abc import Iterable

from client.in_flight import InFlight

PROMPT_TOKEN_BYTES = 40
"""A place in a list, and the number it points to."""

OUTPUT_TOKEN_BYTES = 4
"""A place in an array."""

CHECK_EVERY_S = 1.0
"""Looking at everybody costs a third of a microsecond each; a tokenizer makes about 50 MB of prompts in that time."""


class ResumeMemory:
    """Keeps what the in-flight table holds below a limit, by giving up the largest sequences first.

    So as few as possible lose their safety, and they are those that would cost another engine most. Samples of one
    request share their prompt, which is counted once.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._next_check = float("-inf")

    def find_excess(self, sequences: Iterable[InFlight], now: float) -> list[InFlight]:
        """Return who must be forgotten now, largest first; looks once a second."""
        if now < self._next_check:
            return []
        self._next_check = now + CHECK_EVERY_S
        sizes = _sizes(sequences)
        excess = sum(sizes.values()) - self._max_bytes
        forgotten: list[InFlight] = []
        if excess <= 0:
            return forgotten
        for sequence in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if excess <= 0:
                break
            forgotten.append(sequence)
            excess -= sizes[sequence]
        return forgotten


def _sizes(sequences: Iterable[InFlight]) -> dict[InFlight, int]:
    sizes: dict[InFlight, int] = {}
    prompts: set[int] = set()
    for sequence in sequences:
        if not sequence.is_movable:
            continue
        request = sequence.request
        size = OUTPUT_TOKEN_BYTES * len(sequence.output_ids)
        if id(request.prompt_token_ids) not in prompts:
            prompts.add(id(request.prompt_token_ids))
            size += PROMPT_TOKEN_BYTES * len(request.prompt_token_ids)
            if request.prompt_embeds is not None:
                size += request.prompt_embeds.data.nbytes
        sizes[sequence] = size
    return sizes
