"""Names for the content of KV blocks.

Keys and values of a block depend on every token up to its end, so a block is named by a chain: the hash of (name of the
block before it, its own tokens), begun with the salt. Hashes are 128 bits of BLAKE2b: with Python's ``hash`` a caller
could search for a prompt that is served somebody else's cache.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.scheduler.blocks import BlockHash

_HASH_BYTES = 16
_SALT_DOMAIN = b"salt"  # keeps salts apart from blocks: no salt can be chosen to look like one
_TOKEN_TYPE = "I"  # token ids fit 32 bits; they were checked against the vocabulary at the door


def chain_start(cache_salt: str | None) -> BlockHash:
    """Return the name before the first block, so that sequences of different salts share none; None is one of them."""
    salt = b"" if cache_salt is None else b"=" + cache_salt.encode()
    return blake2b(salt, digest_size=_HASH_BYTES, person=_SALT_DOMAIN).digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the name of a full block. parent: name of the block before it."""
    return blake2b(parent + array(_TOKEN_TYPE, token_ids).tobytes(), digest_size=_HASH_BYTES).digest()
