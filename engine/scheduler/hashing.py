"""Names for the content of KV blocks.

Keys and values of a block depend on every token up to its end, so a block is named by a chain: the hash of (name of the
block before it, its own tokens), begun with the salt. Hashes are 128 bits of BLAKE2b: with Python's ``hash`` a caller
could search for a prompt that is served somebody else's cache.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.scheduler.blocks import BlockHash
from engine.wire.tensors import Tensor

_HASH_BYTES = 16
_SALT_DOMAIN = b"salt"  # keeps salts apart from blocks: no salt can be chosen to look like one
_EMBEDS_DOMAIN = b"embeds"
_TOKEN_TYPE = "I"  # token ids fit 32 bits; they were checked against the vocabulary at the door


def chain_start(cache_salt: str | None, prompt_embeds: Tensor | None = None) -> BlockHash:
    """Return the name before the first block, so that sequences of different salts share none; None is one of them.

    prompt_embeds: the tokens of such a prompt are placeholders, so its content is named here, as a whole: only equal
        prompts share blocks, not those that begin alike.
    """
    salt = b"" if cache_salt is None else b"=" + cache_salt.encode()
    start = blake2b(salt, digest_size=_HASH_BYTES, person=_SALT_DOMAIN).digest()
    if prompt_embeds is None:
        return start
    named = blake2b(start, digest_size=_HASH_BYTES, person=_EMBEDS_DOMAIN)
    named.update(repr((prompt_embeds.dtype, prompt_embeds.shape)).encode())
    named.update(prompt_embeds.data)
    return named.digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the name of a full block. parent: name of the block before it."""
    return blake2b(parent + array(_TOKEN_TYPE, token_ids).tobytes(), digest_size=_HASH_BYTES).digest()
