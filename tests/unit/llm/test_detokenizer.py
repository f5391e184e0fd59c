"""Text out of tokens, one by one: whole characters only, and the same as all at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.llm.detokenizer import Detokenizer
from orchestrator.llm.tokenizer import TextTokenizer, byte_tokenizer
from tests.unit.llm.tokenizers_for_tests import byte_level_bpe, sentencepiece_like

BYTES = byte_tokenizer()
BPE = byte_level_bpe()
PIECES = sentencepiece_like()
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

texts = st.text(st.characters(exclude_characters=REPLACEMENT)) | st.text("ab🐟👩‍👧é日 ")


def stream(tokenizer: TextTokenizer, pieces: list[list[int]], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.flush()]


@given(texts, st.sampled_from([BYTES, BPE]))
def test_token_by_token_the_text_comes_whole(text: str, tokenizer: TextTokenizer) -> None:
    pieces = stream(tokenizer, [[token] for token in tokenizer.encode(text, add_special_tokens=False)])
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(texts, st.sampled_from([BYTES, BPE]), st.data())
def test_any_grouping_of_tokens_gives_the_same_text(text: str, tokenizer: TextTokenizer, data: st.DataObject) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, start = [], 0
    while start < len(ids):
        size = data.draw(st.integers(1, len(ids) - start))
        pieces.append(ids[start : start + size])
        start += size
    assert "".join(stream(tokenizer, pieces)) == text


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_are_decoded_as_a_whole_decode_would_but_for_a_broken_end(ids: list[int]) -> None:
    whole: str = BYTES.backend.decode(ids)
    assert "".join(stream(BYTES, [[token] for token in ids])).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)


def test_a_character_cut_off_at_the_end_is_left_out() -> None:
    ids = list("fish 🐟".encode())[:-1]
    assert "".join(stream(BYTES, [[token] for token in ids])) == "fish "


def test_no_piece_ends_inside_a_character() -> None:
    pieces = stream(BYTES, [[token] for token in "a🐟b".encode()])
    assert pieces == ["a", "", "", "", "🐟", "b", ""]


@pytest.mark.parametrize(("prompt", "answer", "expected"), [("ab", " ab", " ab"), ("", " ab", "ab")])
def test_the_first_token_behind_a_prompt_keeps_its_space(prompt: str, answer: str, expected: str) -> None:
    prompt_ids = PIECES.encode(prompt, add_special_tokens=False) if prompt else []
    ids = PIECES.backend.encode("ab", add_special_tokens=False).ids
    assert "".join(stream(PIECES, [[token] for token in ids], prompt_ids)) == expected


@given(st.text("abc 日🐟", min_size=1))
def test_byte_fallback_streams_like_a_whole_decode(text: str) -> None:
    prompt = PIECES.encode("ab", add_special_tokens=False)
    ids = PIECES.encode(text, add_special_tokens=False)
    whole: str = PIECES.backend.decode(prompt + ids)
    assert "".join(stream(PIECES, [[token] for token in ids], prompt)) == whole[len("ab") :]


def test_special_tokens_are_left_out() -> None:
    end = BPE.backend.token_to_id("<|end|>")
    ids = [*BPE.encode("fish", add_special_tokens=False), end]
    assert "".join(stream(BPE, [[token] for token in ids])) == "fish"


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_output() -> None:
    prompt, answer = (PIECES.backend.token_to_id(piece) for piece in ("<0xE6>", "b"))
    assert "".join(stream(PIECES, [[answer]], [prompt])) == "b"


def test_text_that_changes_in_hindsight_starts_anew() -> None:
    """A run of bytes that turns out to be no text makes this decoder deny the letter that is out already."""
    pieces = ("▁ab", "<0x61>", "<0xE6>", "b", "<0xE6>", "<0x97>", "<0xA5>")
    ids = [PIECES.backend.token_to_id(piece) for piece in pieces]
    assert stream(PIECES, [[token] for token in ids]) == ["ab", "a", "", REPLACEMENT + "b", "", "", "日", ""]
