"""One token as text and as bytes."""

import pytest

from orchestrator.llm.logprobs import TokenTexts
from orchestrator.llm.tokenizer import TextTokenizer, byte_tokenizer
from tests.unit.llm.tokenizers_for_tests import byte_level_bpe, sentencepiece_like

TEXT = "the fish 🐟 naïve a b"


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), byte_level_bpe(), sentencepiece_like()])
def test_the_bytes_of_tokens_join_to_the_bytes_of_the_text(tokenizer: TextTokenizer) -> None:
    texts = TokenTexts(tokenizer.backend)
    data = b"".join(texts[token].data for token in tokenizer.encode(TEXT, add_special_tokens=False))
    assert data.decode().strip() == TEXT


def test_a_part_of_a_character_is_shown_as_such_and_keeps_its_bytes() -> None:
    texts = TokenTexts(byte_tokenizer().backend)
    assert texts[0xF0].text == "\N{REPLACEMENT CHARACTER}"
    assert texts[0xF0].data == b"\xf0"
    assert texts[ord(" ")].text == " "


def test_a_special_token_is_its_name() -> None:
    tokenizer = byte_level_bpe()
    special = tokenizer.backend.token_to_id("<|end|>")
    assert TokenTexts(tokenizer.backend)[special].text == "<|end|>"


def test_an_id_without_a_token_has_no_text() -> None:
    assert TokenTexts(byte_tokenizer().backend)[300] == ("", b"")
