"""The prefix cache: names for the content of KV blocks, and the beginning of a sequence that the pool holds already.

Keys and values of a block depend on every token up to its end, so a block is named by a chain: the hash of (name of the
block before it, its own tokens), begun with the salt. Hashes are 128 bits of BLAKE2b: with Python's ``hash`` a caller
could search for a prompt that is served somebody else's cache.
"""

from array import array
from collections.abc import Sequence, Set
from hashlib import blake2b

from engine.interfaces.plan import SequenceState
from engine.scheduler.blocks import BlockHash, BlockPool
from engine.wire.tensors import Tensor

_HASH_BYTES = 16
_SALT_DOMAIN = b"salt"  # keeps salts apart from blocks: no salt can be chosen to look like one
_EMBEDS_DOMAIN = b"embeds"
_TOKEN_TYPE = "I"  # token ids fit 32 bits: validation has checked them against the vocabulary


def chain_start(cache_salt: str | None, prompt_embeds: Tensor | None = None) -> BlockHash:
    """Return the name before the first block, so that sequences of different salts share none; None is one of them.

    prompt_embeds: the tokens of such a prompt are placeholders, so its content is named here, as a whole: only equal
        prompts share blocks, not those that begin alike.
    """
    # The "=" keeps an empty salt apart from none at all.
    salt = b"" if cache_salt is None else b"=" + cache_salt.encode()
    start = blake2b(salt, digest_size=_HASH_BYTES, person=_SALT_DOMAIN).digest()
    if prompt_embeds is None:
        return start
    # Format and shape are part of the name: the same bytes read as other numbers are another prompt.
    named = blake2b(start, digest_size=_HASH_BYTES, person=_EMBEDS_DOMAIN)
    named.update(repr((prompt_embeds.dtype, prompt_embeds.shape)).encode())
    named.update(prompt_embeds.data)
    return named.digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the name of a full block. parent: name of the block before it."""
    return blake2b(parent + array(_TOKEN_TYPE, token_ids).tobytes(), digest_size=_HASH_BYTES).digest()


class PrefixCache:
    """Finds and notes the content of a sequence's blocks in a pool.

    Only full blocks have a name, so a block that is shared is never written to. A name is worked out once per
    sequence and kept in ``block_hashes``: tokens only join at the end, so it stays true across preemptions.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled

    def find(self, sequence: SequenceState) -> list[int]:
        """Return the blocks that hold the longest known beginning; at least one token stays to be computed.

        Empty when the log-probabilities of the prompt are asked for: the cache holds keys and values, no logits.
        They are not in use yet: the caller that wants them calls ``share`` of the pool before it allocates anything.
        """
        blocks: list[int] = []
        for index in range(self._num_findable(sequence)):
            block = self._pool.find(self._name(sequence, index))
            if block is None:
                break  # a later block may still be known, but without this one its keys and values are of no use
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
        if not self._enabled or sequence.awaits_prompt_logprobs:
            return 0
        # Without the last token: something has to be computed, or there is nothing to sample from.
        return (len(sequence.token_ids) - 1) // self._pool.block_size

    def _name(self, sequence: SequenceState, index: int) -> BlockHash:
        names = sequence.block_hashes
        size = self._pool.block_size
        while index >= len(names):
            start = len(names) * size
            parent = names[-1] if names else chain_start(sequence.cache_salt, sequence.prompt_embeds)
            names.append(block_hash(parent, sequence.token_ids[start : start + size]))
        return names[index]
