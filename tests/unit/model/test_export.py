"""The tokenizer of any model becomes files that need no transformers to read; once, whole, and with clear failures."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import LlamaConfig

from engine.model.export import export
from engine.model.model_info import ModelInfo
from engine.model.names import resolve_model
from engine.model.tokenizer_files import ExportReady, ExportSpec, export_folder, tokenizer_folder
from engine.wire.errors import StartupError

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a checkpoint with the older vocabulary files, from which tokenizer.json must be made."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    LlamaConfig(vocab_size=6, max_position_embeddings=77, eos_token_id=5).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "<|end|>": 5}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    settings |= {"unk_token": "<|end|>", "bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 4]}))
    return folder


def run_export(model: Path, cache: Path) -> ExportReady:
    return export(ExportSpec(model=str(model), cache_dir=str(cache)))


def test_all_files_are_written(model: Path, tmp_path: Path) -> None:
    ready = run_export(model, tmp_path / "cache")
    folder = Path(ready.tokenizer_dir)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("abcab").ids == [4, 3]
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    info = msgspec.json.decode((folder / "model_info.json").read_bytes(), type=ModelInfo)
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (6, 77, (4, 5))


def test_a_second_export_finds_the_first_and_a_changed_model_is_exported_anew(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = run_export(model, cache)
    inode = Path(first.tokenizer_dir).stat().st_ino
    assert run_export(model, cache) == first
    assert Path(first.tokenizer_dir).stat().st_ino == inode, "it was written again"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "another"}))
    assert tokenizer_folder(resolve_model(str(model)), cache) is None
    assert run_export(model, cache).tokenizer_dir != first.tokenizer_dir


def test_a_folder_with_a_tokenizer_file_needs_no_export(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(resolve_model(str(model))) == model
    assert run_export(model, tmp_path / "cache") == ExportReady(tokenizer_dir=str(model))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["config.json", "vocab.json"])
def test_a_damaged_model_is_one_line_and_leaves_nothing(model: Path, tmp_path: Path, damage: str) -> None:
    (model / damage).write_text("{ not json")
    with pytest.raises(StartupError, match="tiny") as refusal:
        run_export(model, tmp_path / "cache")
    assert "\n" not in str(refusal.value)
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(StartupError, match="cannot be written to"):
        run_export(model, tmp_path / "cache")


def test_the_process_prints_one_line_and_loads_no_torch_when_files_are_fresh(model: Path, tmp_path: Path) -> None:
    spec = ExportSpec(model=str(model), cache_dir=str(tmp_path / "cache"))
    folder = export_folder(resolve_model(str(model)), tmp_path / "cache")
    folder.mkdir(parents=True)
    code = (
        "import sys; from engine.model.export import main; s = main(); assert 'torch' not in sys.modules; sys.exit(s)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=msgspec.json.encode(spec), capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout, type=ExportReady) == ExportReady(tokenizer_dir=str(folder))
    assert done.stdout.count(b"\n") == 1


@pytest.mark.parametrize("spec", [b'{"model": "./nothing"}', b'{"model": 3}', b"", b'{"model": "x", "colour": 1}'])
def test_the_process_fails_with_one_error_line(spec: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.model.export"], input=spec, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1, done.stderr
    assert b"ERROR" in done.stderr
