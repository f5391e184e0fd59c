"""Which beginning of a sequence the KV cache holds already."""

from collections.abc import Set

from engine.interfaces.plan import SequenceState
from engine.scheduler.blocks import BlockHash, BlockPool
from engine.scheduler.hashing import block_hash, chain_start


class PrefixCache:
    """Finds and notes the content of a sequence's blocks in a pool.

    Only full blocks have a name, so nobody ever writes into a block that is shared. A name is worked out once per
    sequence and kept in ``block_hashes``: tokens only join at the end, so it stays true across preemptions.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled

    def find(self, sequence: SequenceState) -> list[int]:
        """Return the blocks that hold the longest known beginning; at least one token stays to be computed.

        Empty when the log-probabilities of the prompt are to come: the cache holds keys and values, no scores.
        They are not in use yet: whoever wants them calls ``share`` of the pool before anything is allocated.
        """
        blocks: list[int] = []
        for index in range(self._num_findable(sequence)):
            block = self._pool.find(self._name(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def next_block(self, sequence: SequenceState) -> tuple[int, BlockHash] | None:
        """Return place and name of the full block that a sequence which runs computes next; None when there is none."""
        index = sequence.num_computed // self._pool.block_size
        if not self._enabled or (index + 1) * self._pool.block_size > len(sequence.token_ids):
            return None
        return index, self._name(sequence, index)

    def could_use(self, sequence: SequenceState, index: int, names: Set[BlockHash]) -> bool:
        """Tell whether one of these blocks is the one at ``index`` of a sequence that waits, and may spare it work."""
        return index < self._num_findable(sequence) and self._name(sequence, index) in names

    def commit(self, sequence: SequenceState, start: int, end: int) -> None:
        """Note the blocks that became full because tokens ``[start, end)`` were computed."""
        if self._enabled:
            for index in range(start // self._pool.block_size, end // self._pool.block_size):
                self._pool.commit(sequence.block_table[index], self._name(sequence, index))

    def reset(self) -> bool:
        """Forget the content of every free block; True when the cache is empty now, because no content was in use."""
        return self._pool.forget_free()

    def _num_findable(self, sequence: SequenceState) -> int:
        """Return how many of its first blocks a sequence could be spared."""
        if not self._enabled or sequence.awaits_prompt_logprobs:
            return 0
        return (len(sequence.token_ids) - 1) // self._pool.block_size

    def _name(self, sequence: SequenceState, index: int) -> BlockHash:
        names = sequence.block_hashes
        size = self._pool.block_size
        while index >= len(names):
            start = len(names) * size
            parent = names[-1] if names else chain_start(sequence.cache_salt, sequence.prompt_embeds)
            names.append(block_hash(parent, sequence.token_ids[start : start + size]))
        return names[index]
