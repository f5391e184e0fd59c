"""Log-probabilities, packed as they travel."""

import struct

import pytest

from engine.wire.logprobs import Logprobs


def packed(num_top: int, *positions: tuple[float, list[int], list[float]]) -> Logprobs:
    return Logprobs(
        num_top,
        b"".join(struct.pack("<f", chosen) for chosen, _, _ in positions),
        b"".join(struct.pack(f"<{num_top}i", *ids) for _, ids, _ in positions),
        b"".join(struct.pack(f"<{num_top}f", *values) for _, _, values in positions),
    )


def test_positions_come_back_in_order() -> None:
    logprobs = packed(2, (-0.5, [7, 9], [-0.5, -1.0]), (-3.0, [1, 2], [-0.25, -0.75]))
    assert len(logprobs) == 2
    assert [tuple(position) for position in logprobs.positions()] == [
        (-0.5, (7, 9), (-0.5, -1.0)),
        (-3.0, (1, 2), (-0.25, -0.75)),
    ]


def test_later_tokens_join_behind_earlier_ones() -> None:
    first, second = (-0.5, [7], [-0.5]), (-3.0, [1], [-0.25])
    assert packed(1, first) + packed(1, second) == packed(1, first, second)


def test_without_best_tokens_there_are_only_the_chosen_ones() -> None:
    assert [tuple(p) for p in packed(0, (-1.0, [], []), (-2.0, [], [])).positions()] == [(-1.0, (), ()), (-2.0, (), ())]


def test_parts_that_do_not_belong_together_are_an_error() -> None:
    with pytest.raises(struct.error):
        list(Logprobs(2, b"\0" * 4, b"", b"").positions())
