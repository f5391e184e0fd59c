"""A KV cache that is sized by what is free leaves room for the experts that come later."""

from pathlib import Path
from typing import Any

import pytest

from engine.config.engine_config import ModelConfig, ParallelConfig, SchedulerConfig
from engine.parallel.checkpoint import max_rows
from engine.parallel.runner import ParallelRunner
from engine.runner.kv_cache import allocate_cache
from engine.wire.errors import StartupError
from tests.unit.runner.families import load, save_family, without_bars


@pytest.mark.parametrize(
    ("min_members", "num_redundant", "expected"),
    [(1, 0, 8 + 4), (1, 2, 8 + 5), (2, 0, 4 + 4), (3, 0, 3 + 3), (4, 3, 3 + 3), (16, 0, 1 + 1)],
)
def test_room_is_for_the_smallest_group_and_the_one_before_or_after_it(
    min_members: int, num_redundant: int, expected: int
) -> None:
    parallel = ParallelConfig(min_members=min_members, num_redundant_experts=num_redundant)
    assert max_rows(8, parallel) == expected


def test_the_cache_leaves_that_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family("qwen3_moe", tmp_path)
    reserved: list[int] = []

    def allocate(*arguments: Any) -> Any:
        reserved.append(arguments[-1])
        return allocate_cache(*arguments)

    monkeypatch.setattr("engine.runner.torch_runner.allocate_cache", allocate)
    parallel = ParallelConfig(min_members=2)
    with without_bars():
        start(tmp_path, parallel).close()
    experts = [p for name, p in load(tmp_path).named_parameters() if ".experts." in name]
    assert reserved == [sum(parameter.nbytes for parameter in experts)], "half of them, twice"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=str(tmp_path)):
        start(tmp_path, ParallelConfig())


def start(folder: Path, parallel: ParallelConfig) -> ParallelRunner:
    model = ModelConfig(model=str(folder), dtype="float32", device="cpu")
    return ParallelRunner(model, SchedulerConfig(kv_cache_memory_bytes=4 << 20), parallel, lambda what, share: None)
