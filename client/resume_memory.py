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
        sharers = _by_prompt(sequences)
        sizes = [(_size(group), group) for group in sharers]
        excess = sum(size for size, _ in sizes) - self._max_bytes
        forgotten: list[InFlight] = []
        for size, group in sorted(sizes, key=lambda sized: sized[0], reverse=True):
            if excess <= 0:
                break
            forgotten += group  # all of them: as long as one is kept, so is the prompt
            excess -= size
        return forgotten


def _by_prompt(sequences: Iterable[InFlight]) -> list[list[InFlight]]:
    """Return those that can be moved, samples of one prompt together."""
    groups: dict[int, list[InFlight]] = {}
    for sequence in sequences:
        if sequence.can_migrate:
            groups.setdefault(id(sequence.request.prompt_token_ids), []).append(sequence)
    return list(groups.values())


def _size(sharers: list[InFlight]) -> int:
    request = sharers[0].request
    embeds = 0 if request.prompt_embeds is None else request.prompt_embeds.data.nbytes
    outputs = sum(len(sequence.output_ids) for sequence in sharers)
    return OUTPUT_TOKEN_BYTES * outputs + PROMPT_TOKEN_BYTES * len(request.prompt_token_ids) + embeds
