"""The tokens of the sim engine: text-like bytes that depend on nothing but the request and the position."""

import math
import zlib
from array import array
from collections.abc import Sequence

from engine.wire.tensors import Buffer

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

ALPHABET = b"etaoinshrdlucmfwypvbgk      "
"""Printable ASCII, one byte token each, with enough spaces to look like words."""


def prompt_hash(prompt_token_ids: Sequence[int], embeds: Buffer | None = None) -> int:
    """Return 32 bits that stand for a prompt: of its tokens, each of which must fit 32 bits, or of its embeddings."""
    return zlib.crc32(array("I", prompt_token_ids) if embeds is None else embeds)


def stream_base(prompt: int, seed: int, sample_index: int) -> int:
    """Return the number all tokens of one stream grow from. prompt: see ``prompt_hash``."""
    return _mix(prompt + _mix(seed + _GOLDEN * (sample_index + 1)))


def token_at(base: int, position: int) -> int:
    """Return output token ``position`` of a stream: the same on every engine, in every attempt and batch."""
    return ALPHABET[_mix(base + _GOLDEN * (position + 1)) % len(ALPHABET)]


def vector_of(prompt: int, size: int, *, normalize: bool) -> bytes:
    """Return float32 [size] that depend on nothing but the prompt (see ``prompt_hash``), each in -1..1 at first."""
    values = [_mix(prompt + _GOLDEN * (index + 1)) / 2**63 - 1 for index in range(size)]
    length = math.hypot(*values) if normalize else 1.0
    return array("f", [value / length for value in values]).tobytes()


def _mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64, Steele, Lea and Flood 2014)."""
    value &= _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
