"""Messages with something wrong in them, from a seed: broken bytes, and whole messages with values of other kinds."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**32, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "", "x" * 300, "\x00"),
    *(b"", bytes(8), [], {}, [[[]]], {"x": []}, [0, 1], [0, 2**40], [-1, -1], {1: 2}, msgspec.msgpack.Ext(5, b"odd")),
]


def mutations(frames: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Yield variations of these frames without end, by turns of their bytes and of their values."""
    rng = random.Random(seed)
    values = [msgspec.msgpack.decode(frame) for frame in frames]
    while True:
        yield mutate_bytes(rng.choice(frames), rng)
        yield msgspec.msgpack.encode(_mutate_value(rng.choice(values), rng))


def mutate_bytes(frame: bytes, rng: random.Random) -> bytes:
    """Return the frame with a few bytes changed, inserted or cut off."""
    mutated = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(mutated) + 1)
        match rng.randrange(4):
            case 0:
                mutated[position : position + 1] = bytes([rng.randrange(256)])
            case 1:
                mutated.insert(position, rng.randrange(0x80, 0x100))
            case 2:
                del mutated[position:]
            case 3:
                mutated[position:] = mutated[position:] + rng.randbytes(3)
    return bytes(mutated)


def _mutate_value(value: Any, rng: random.Random) -> Any:
    """Return the value with one thing somewhere inside it replaced, left out or said twice."""
    if not isinstance(value, list) or not value or rng.random() < 1 / 8:
        return rng.choice(ODD_VALUES)
    position = rng.randrange(len(value))
    match rng.randrange(12):
        case 0:
            changed = []
        case 1:
            changed = [value[position]] * 2
        case _:
            changed = [_mutate_value(value[position], rng)]
    return [*value[:position], *changed, *value[position + 1 :]]
