"""The pool of KV blocks: which sequences use a block, and what a free block still holds."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

BlockHash = bytes
"""Names the content of a full block: its own tokens and all before them (see ``prefix_cache.py``)."""


class BlockPool:
    """Hands out the numbers ``0..num_blocks - 1``, counts the sequences that use each, and finds blocks by content.

    A block is in use (``_references`` > 0), or free and blank, or free with known content. Blank ones are handed out
    first, the one freed last first, so that its memory is still warm; then the content that was used longest ago goes.
    Every operation costs the same however large the pool is, and nothing here grows with time.

    Invariants: a free block is in exactly one of ``_blank`` and ``_reusable``; ``_block_of`` and ``_hash_of`` are
    inverse to each other; a block in use is in neither free list, whether it has a hash or not.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack, lowest number on top
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    @property
    def num_free(self) -> int:
        """Return how many blocks can be allocated now."""
        return len(self._blank) + len(self._reusable)

    @property
    def num_tokens(self) -> int:
        """Return the tokens the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Return the used share, 0..1; a block that several sequences use counts once, a free one not at all."""
        return 1 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    # --- taking and giving back -------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks to write, or none at all (None) when fewer are free.

        What they held is forgotten here and not when they are written: it must not be found meanwhile.
        """
        if count > self.num_free:
            return None
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Use blocks that ``find`` returned; they are to be read only."""
        for block in blocks:
            if self._references[block] == 0:
                del self._reusable[block]
            self._references[block] += 1

    def free(self, blocks: list[int]) -> None:
        """Stop using blocks; empties the list, so that its owner cannot use or free them again.

        The last block goes first: a beginning is worth more than what follows it, which cannot be found without it.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, "a block was freed twice"
            if self._references[block] == 0:
                self._add_free(block)
        blocks.clear()

    def num_unused(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are free."""
        return sum(self._references[block] == 0 for block in blocks)

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks have a single user."""
        return sum(self._references[block] == 1 for block in blocks)

    # --- content ----------------------------------------------------------------------------------------------------

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block that holds this content."""
        return self._block_of.get(block_hash)

    def commit(self, block: int, block_hash: BlockHash) -> None:
        """Note what a block holds, now that all of it is written.

        Content that another block holds already stays with that one: two sequences computed it at the same time.
        """
        if block_hash not in self._block_of:  # a table that a runner may have copied only grows: it is not exchanged
            assert block not in self._hash_of, "a block with known content was written again"
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, blocks: Sequence[int]) -> None:
        """Let the content of these blocks be found no more; sequences that use them go on."""
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._block_of[block_hash]
                if self._references[block] == 0:
                    del self._reusable[block]
                    self._blank.append(block)

    def forget_free(self) -> bool:
        """Forget the content of every free block; True when no content is left, because none was in use."""
        self.forget(list(self._reusable))
        return not self._hash_of

    def _add_free(self, block: int) -> None:
        if block in self._hash_of:
            self._reusable[block] = None
        else:
            self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._reusable.popitem(last=False)  # the front: blocks join at the back when their last user leaves
        del self._block_of[self._hash_of.pop(block)]
        return block
