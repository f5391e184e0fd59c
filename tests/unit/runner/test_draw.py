"""The generator is the published one, and its numbers are a function of their names."""

import numpy as np
import pytest

from engine.runner.draw import philox4x32, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([ONES] * 4, [ONES] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_the_reference_implementation(counter: list[int], key: list[int], words: str) -> None:
    result = philox4x32(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))[0]
    assert " ".join(f"{word:08x}" for word in result) == words


def test_numbers_are_uniform_in_the_unit_interval() -> None:
    numbers = uniforms([(seed, 0, position) for seed in range(40) for position in range(500)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert chi_square < 99 + 4 * np.sqrt(2 * 99)


def test_each_part_of_the_name_counts_and_nothing_else() -> None:
    draws = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1 << 63, 0, 0), (-1, 0, 0), (0, 0, 0)]
    numbers = uniforms(draws)
    assert len(set(numbers.tolist())) == len(draws)
    assert uniforms(draws[::-1]).tolist() == numbers[::-1].tolist()
    assert uniforms([(1 + (1 << 64), 0, 0)]).tolist() == numbers[:1].tolist()
