"""The pool of KV blocks: who may write where."""


class BlockPool:
    """Hands out the numbers ``0..num_blocks - 1``; a block belongs to one sequence at a time.

    The free list is a stack, so that a block is reused while its memory is still warm. Sharing blocks by content
    (prefix caching) belongs here: ``allocate`` would look a hash up first and ``free`` would drop a reference.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Return how many blocks can be allocated now."""
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        """Return the tokens the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Return the used share, 0..1."""
        return 1 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, or none at all (None) when fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        """Give back what ``allocate`` gave; empties the list, so that its owner cannot use or free it again."""
        self._free.extend(reversed(blocks))
        blocks.clear()
        assert len(self._free) <= self.num_blocks, "a block was freed twice"
