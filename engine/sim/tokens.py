"""The sim engine's tokens: text-like bytes that depend on nothing but the request and the position."""

import zlib
from array import array
from collections.abc import Sequence

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

ALPHABET = b"etaoinshrdlucmfwypvbgk      "
"""Printable ASCII, one byte token each, with enough spaces to look like words."""


def stream_base(prompt_token_ids: Sequence[int], seed: int, sample_index: int) -> int:
    """Return the number all tokens of one stream grow from; token ids must fit 32 bits."""
    prompt_hash = zlib.crc32(array("I", prompt_token_ids))
    return _mix(prompt_hash + _mix(seed + _GOLDEN * (sample_index + 1)))


def token_at(base: int, position: int) -> int:
    """Return output token ``position`` of a stream: the same on every engine, in every attempt and batch."""
    return ALPHABET[_mix(base + _GOLDEN * (position + 1)) % len(ALPHABET)]


def _mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64, Steele, Lea and Flood 2014)."""
    value &= _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
