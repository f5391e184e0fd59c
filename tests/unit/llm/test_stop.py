"""Stop strings: found however the text is cut, exact, and nothing taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.llm.detokenizer import StopChecker

pieces_strategy = st.lists(st.text("abc", max_size=4), max_size=12)
stops_strategy = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Character by character: the first position at which any stop string ends, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return (text[:end] if include else text[: end - len(max(matches, key=len))]), True
    return text, False


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], bool]:
    checker = StopChecker(stops, include)
    out = []
    for piece in pieces:
        text, stopped = checker.feed(piece)
        out.append(text)
        if stopped:
            return out, True
    return [*out, checker.flush()], False


@given(pieces_strategy, stops_strategy, st.booleans())
def test_any_cutting_gives_what_the_naive_search_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    out, stopped = run(pieces, stops, include)
    assert ("".join(out), stopped) == naive("".join(pieces), stops, include)


@given(pieces_strategy, stops_strategy)
def test_what_is_out_never_has_to_be_taken_back(pieces: list[str], stops: list[str]) -> None:
    """Everything that got out before the last piece is a prefix of every possible end of the stream."""
    checker = StopChecker(stops)
    out, seen = "", ""
    for piece in pieces:
        seen += piece
        text, stopped = checker.feed(piece)
        out += text
        if stopped:
            break
        for stop in stops:
            cut, _ = naive(seen + stop, stops, include=False)
            assert cut.startswith(out)


def test_only_a_possible_start_is_held_back() -> None:
    checker = StopChecker(["END"])
    assert checker.feed("the E") == ("the ", False)
    assert checker.feed("N") == ("", False)
    assert checker.feed("x") == ("ENx", False)
    assert checker.flush() == ""


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one END")])
def test_the_cut_is_exact(include: bool, expected: str) -> None:
    assert StopChecker(["END"], include).feed("one END two") == (expected, True)
