"""What a scheduler is checked against: a device that knows what each KV slot was computed from, and a naive cache."""

from typing import Any

from engine.interfaces.plan import ScheduledChunk, SequenceState, StepPlan

Content = tuple[str | None, tuple[int, ...]]
"""What keys and values depend on: the salt (by agreement) and every token so far."""


def content(sequence: SequenceState, end: int) -> Content:
    return sequence.cache_salt, tuple(sequence.token_ids[:end])


class FakeDevice:
    """KV memory in which each slot holds what it was computed from; reading anything else fails the test."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots: list[Any] = [None] * (num_blocks * block_size)

    def run(self, plan: StepPlan) -> None:
        """Write every chunk, then read every position a chunk's attention reads."""
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self._slots[self._slot(chunk, position)] = content(chunk.sequence, position + 1)
        for chunk in plan.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                assert self._slots[self._slot(chunk, position)] == content(chunk.sequence, position + 1)

    def garble(self, plan: StepPlan) -> None:
        """Break off in the worst way: everything the plan writes is rubbish."""
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self._slots[self._slot(chunk, position)] = "rubbish"

    def _slot(self, chunk: ScheduledChunk, position: int) -> int:
        block = chunk.sequence.block_table[position // self._block_size]
        return block * self._block_size + position % self._block_size


class NaiveCache:
    """Follows plans from outside: what each block holds, spelt out in full, and so how many tokens each hit must have.

    It knows no eviction rule: a block that appears in a table as a new one is forgotten.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.contents: dict[int, Content] = {}
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._tables: dict[int, tuple[list[int], int]] = {}
        self._cached: dict[int, int] = {}
        self._begun: set[int] = set()

    def on_plan(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            sequence = chunk.sequence
            table = sequence.block_table
            known, num_known = self._tables.get(sequence.request_id, (None, 0))
            if known is not table:
                num_known = self._check_admission(chunk)
            for block in table[num_known:]:
                self.contents.pop(block, None)
            self._tables[sequence.request_id] = (table, len(table))

    def before_apply(self, kept: list[tuple[ScheduledChunk, bool]]) -> None:
        """Take in what ``apply`` will commit. kept: chunks of those not dropped meanwhile, and whether each failed."""
        for chunk, failed in kept:
            sequence = chunk.sequence
            if sequence.request_id not in self._begun:
                self._begun.add(sequence.request_id)
                self.num_query_tokens += len(sequence.token_ids)
                self.num_hit_tokens += self._cached[sequence.request_id]
            if failed:
                for block in sequence.block_table:
                    self.contents.pop(block, None)
            else:
                self._fill(chunk)

    def reset(self, used: set[int]) -> bool:
        self.contents = {block: held for block, held in self.contents.items() if block in used}
        return not self.contents

    def num_cached(self, sequence: SequenceState) -> int:
        return self._cached[sequence.request_id]

    def _check_admission(self, chunk: ScheduledChunk) -> int:
        sequence = chunk.sequence
        held = set() if sequence.awaits_prompt_logprobs else set(self.contents.values())
        num_hits = 0
        while (end := (num_hits + 1) * self._block_size) < len(sequence.token_ids) and content(sequence, end) in held:
            num_hits += 1
        assert chunk.start == num_hits * self._block_size
        for index, block in enumerate(sequence.block_table[:num_hits]):
            assert self.contents[block] == content(sequence, (index + 1) * self._block_size)
        if sequence.request_id not in self._begun:
            self._cached[sequence.request_id] = chunk.start
        return num_hits

    def _fill(self, chunk: ScheduledChunk) -> None:
        end = chunk.start + chunk.num_tokens
        for index in range(chunk.start // self._block_size, end // self._block_size):
            held = content(chunk.sequence, (index + 1) * self._block_size)
            if held not in self.contents.values():
                self.contents[chunk.sequence.block_table[index]] = held
