"""What is made once out of a model is there whole or not at all, and is made anew when the model changes."""

import fcntl
import os
from pathlib import Path

import pytest

from engine.model.cache import cached_name, default_cache_dir, making_folder, one_at_a_time
from engine.model.names import ResolvedModel


def model_in(folder: Path, display_name: str = "known") -> ResolvedModel:
    return ResolvedModel(path=str(folder), gguf_file="m 1.gguf", display_name=display_name, is_local=True)


def test_the_name_is_readable_and_follows_every_change_of_the_source(tmp_path: Path) -> None:
    source = tmp_path / "m 1.gguf"
    source.write_bytes(b"one")
    names = [cached_name(model_in(tmp_path)), cached_name(model_in(tmp_path), "float32")]
    assert names[0].startswith("m-1-")
    assert cached_name(model_in(tmp_path, "known by another name")) == names[0]
    source.write_bytes(b"longer")
    names.append(cached_name(model_in(tmp_path)))
    os.utime(source, ns=(1, 1))
    names.append(cached_name(model_in(tmp_path)))
    assert len(set(names)) == 4


def test_a_folder_appears_only_when_it_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "below" / "made"
    with making_folder(folder) as made:
        (made / "file").write_text("whole")
        assert not folder.exists()
    assert (folder / "file").read_text() == "whole"
    assert [entry.name for entry in folder.parent.iterdir()] == ["made"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with making_folder(tmp_path / "made") as made:
            (made / "file").write_text("half")
            raise ValueError("half done")

    with pytest.raises(ValueError, match="half done"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_finish_the_first_stays(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with making_folder(folder) as slow:
        (slow / "file").write_text("slow")
        with making_folder(folder) as fast:
            (fast / "file").write_text("fast")
    assert (folder / "file").read_text() == "fast"
    assert [entry.name for entry in tmp_path.iterdir()] == ["made"]


def test_only_one_holds_the_lock(tmp_path: Path) -> None:
    with one_at_a_time(tmp_path / "made"):
        (lock,) = tmp_path.iterdir()
        with lock.open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "shoal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "shoal"
