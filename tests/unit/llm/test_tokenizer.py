"""The tokenizers: bytes for the sim engine, a model's own files for a model."""

import json
from pathlib import Path

import pytest

from engine.wire.errors import StartupError
from orchestrator.llm.tokenizer import byte_tokenizer, load_tokenizer
from tests.unit.llm.tokenizers_for_tests import byte_level_bpe, sentencepiece_like


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_bpe().backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_an_id_of_the_byte_tokenizer_is_the_byte() -> None:
    text = "héllo 🐟\n\x00"
    assert byte_tokenizer().encode(text, add_special_tokens=True) == list(text.encode())


def test_every_byte_decodes_to_itself() -> None:
    assert byte_tokenizer().backend.decode(list(range(128))) == bytes(range(128)).decode()


def test_the_byte_tokenizer_chats() -> None:
    template = byte_tokenizer().chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "user: hi\nassistant: "


def test_the_template_file_wins_over_the_one_in_the_configuration(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old", "bos_token": {"content": "<s>"}}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}new")
    template = load_tokenizer(folder).chat_template
    assert template is not None
    assert template.render([]) == "<s>new"


def test_of_several_named_templates_the_default_one_is_taken(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = load_tokenizer(folder).chat_template
    assert template is not None
    assert template.render([]) == "plain"


def test_a_base_model_has_no_template(folder: Path) -> None:
    assert load_tokenizer(folder).chat_template is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_only_byte_level_tokens_are_text_without_their_neighbours(folder: Path) -> None:
    assert load_tokenizer(folder).whole_texts is not None
    assert sentencepiece_like().whole_texts is None


def test_a_part_of_a_character_has_no_text_of_its_own() -> None:
    texts = byte_tokenizer().whole_texts
    assert texts is not None
    assert [texts[byte] for byte in "a🐟".encode()] == ["a", None, None, None, None]


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level_bpe().backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "the fish swim in a shoal"
    assert load_tokenizer(tmp_path).encode(text, True) == byte_level_bpe().encode(text, True)
