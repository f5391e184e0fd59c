"""A checkpoint is read in parts: each part is what the library reads, and no byte of the others is touched."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

from engine.model import expert_weights
from engine.model.expert_weights import ExpertCheckpoint, find_experts
from engine.wire.errors import StartupError
from tests.unit.runner.families import _SIZES, FAMILIES, without_bars

SINGLE = {"save_original_format": True}
SHARDED = {"save_original_format": True, "max_shard_size": "60KB"}
FUSED = {"save_original_format": False}
LAYOUTS: dict[str, dict[str, Any]] = {"single": SINGLE, "sharded": SHARDED, "fused": FUSED}
NUM_EXPERTS = 4

MODELS: dict[str, Callable[[], Any]] = {
    **{name: FAMILIES[name] for name in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss_sinks")},
    "with_a_dense_layer": lambda: Qwen3MoeConfig(
        **_SIZES, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0]
    ),
    "with_a_shared_expert": lambda: Qwen2MoeConfig(
        **_SIZES, moe_intermediate_size=48, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
    "with_tied_embeddings": lambda: Qwen3MoeConfig(
        **_SIZES, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True
    ),
}


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    with without_bars():
        yield


def save(config: Any, folder: Path, **layout: Any) -> Path:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **layout)  # type: ignore[no-untyped-call]
    return folder


def open_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> ExpertCheckpoint:
    return ExpertCheckpoint(str(folder), dtype, "eager", "eager")


def full_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def expert_parameters(model: Any) -> dict[str, torch.Tensor]:
    return {
        f"{owner}.{name}": parameter
        for owner, module in find_experts(model).items()
        for name, parameter in module.named_parameters(recurse=False)
    }


def test_the_layouts_are_what_their_names_say(tmp_path: Path) -> None:
    folders = {name: save(MODELS["qwen3_moe"](), tmp_path / name, **layout) for name, layout in LAYOUTS.items()}
    assert len(list(folders["sharded"].glob("*.safetensors"))) > 2
    names = {
        name: [key for file in folder.glob("*.safetensors") for key in load_file(file)]
        for name, folder in folders.items()
    }
    of_one = {name: any(".experts.0." in key for key in keys) for name, keys in names.items()}
    assert of_one == {"single": True, "sharded": True, "fused": False}


class Meter:
    """Stands in for ``safe_open`` and counts the bytes that are read."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}

    def __call__(self, file: str, framework: str) -> Any:
        return _MeteredFile(self, safe_open(file, framework=framework))


class _MeteredFile:
    def __init__(self, meter: Meter, opened: Any) -> None:
        self._meter, self._opened = meter, opened

    def __enter__(self) -> "_MeteredFile":
        self._opened.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self._opened.__exit__(*reason)

    def keys(self) -> list[str]:
        return list(self._opened.keys())

    def get_slice(self, name: str) -> "_MeteredSlice":
        return _MeteredSlice(self._meter, name, self._opened.get_slice(name))


class _MeteredSlice:
    def __init__(self, meter: Meter, name: str, taken: Any) -> None:
        self._meter, self._name, self._slice = meter, name, taken

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._slice, attribute)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._slice[index]
        self._meter.read[self._name] = self._meter.read.get(self._name, 0) + tensor.nbytes
        return tensor


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_dense_weights_are_those_of_the_whole_model(model: str, layout: str, tmp_path: Path) -> None:
    folder = save(MODELS[model](), tmp_path, **LAYOUTS[layout])
    dense, full = open_checkpoint(folder).load_dense(), full_model(folder)
    expected, experts = full.state_dict(), expert_parameters(full)
    found = dense.state_dict()
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in found.items() if tensor.is_meta]
    for name, tensor in found.items():
        if name in experts:
            assert tensor.shape == (0, *expected[name].shape[1:]), name
        else:
            assert torch.equal(tensor, expected[name]), name
    for (name, buffer), (_, other) in zip(dense.named_buffers(), full.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    tied = full.lm_head.weight is full.model.embed_tokens.weight
    assert (dense.lm_head.weight is dense.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_any_experts_are_those_of_the_whole_model_in_ascending_order(model: str, layout: str, tmp_path: Path) -> None:
    folder = save(MODELS[model](), tmp_path, **LAYOUTS[layout])
    checkpoint, expected = open_checkpoint(folder), expert_parameters(full_model(folder))
    assert checkpoint.num_experts == NUM_EXPERTS
    for asked in ([3, 1], [2], [0, 1, 2, 3], []):
        found = {
            f"{owner}.{name}": tensor
            for owner, parameters in checkpoint.load_experts(asked).items()
            for name, tensor in parameters.items()
        }
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.device.type == "cpu", f"{name} was never read"
            assert torch.equal(tensor, expected[name][sorted(asked)]), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_no_byte_is_read_that_is_not_wanted(
    model: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(MODELS[model](), tmp_path, **LAYOUTS[layout])
    full = full_model(folder)
    experts = expert_parameters(full)
    num_expert_bytes = sum(tensor.nbytes for tensor in experts.values())
    num_dense_bytes = sum(tensor.nbytes for name, tensor in full.named_parameters() if name not in experts)

    def num_read(load: Callable[[ExpertCheckpoint], Any]) -> int:
        meter = Meter()
        checkpoint = open_checkpoint(folder)
        monkeypatch.setattr(expert_weights, "safe_open", meter)
        load(checkpoint)
        return sum(meter.read.values())

    assert num_read(lambda checkpoint: checkpoint.load_dense()) == num_dense_bytes
    assert num_read(lambda checkpoint: checkpoint.load_experts([1])) == num_expert_bytes / NUM_EXPERTS
    assert num_read(lambda checkpoint: checkpoint.load_experts([0, 3])) == num_expert_bytes / 2
    assert num_read(lambda checkpoint: checkpoint.load_experts([])) == 0


def test_the_number_format_is_the_one_asked_for_or_the_checkpoints_own(tmp_path: Path) -> None:
    folder = save(MODELS["mixtral"](), tmp_path)
    expected = full_model(folder, torch.bfloat16)
    checkpoint = open_checkpoint(folder, torch.bfloat16)
    assert checkpoint.load_dense().lm_head.weight.equal(expected.lm_head.weight)
    for owner, parameters in checkpoint.load_experts([1]).items():
        for name, tensor in parameters.items():
            assert torch.equal(tensor, expert_parameters(expected)[f"{owner}.{name}"][[1]])
    assert ExpertCheckpoint(str(folder), None, "eager", "eager").load_dense().dtype == torch.float32


def without(folder: Path, pattern: str) -> Path:
    """Take the tensors whose names match out of a checkpoint."""
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not re.search(pattern, name)}
    save_file(kept, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "pattern", [r"layers\.1.*experts\.2\.", r"layers\.1.*experts\.2\.down_proj"], ids=["all of it", "one tensor of it"]
)
def test_an_expert_that_is_missing_is_named(pattern: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(without(save(MODELS["qwen3_moe"](), tmp_path), pattern))
    with pytest.raises(StartupError, match=r"lacks expert 2 of model\.layers\.1\.mlp"):
        checkpoint.load_experts([1, 2])
    assert checkpoint.load_experts([0, 1]), "those that are there can be had"


def test_a_tensor_of_all_experts_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = without(save(MODELS["gpt_oss_sinks"](), tmp_path), r"layers\.1.*experts\.down_proj$")
    with pytest.raises(StartupError, match=r"lacks .*layers\.1\.mlp\.experts\.down_proj"):
        open_checkpoint(folder).load_experts([1, 2])


def test_a_dense_weight_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = without(save(MODELS["qwen3_moe"](), tmp_path), r"layers\.0\.self_attn\.q_proj")
    with pytest.raises(StartupError, match=r"lacks the weights model\.layers\.0\.self_attn\.q_proj\.weight"):
        open_checkpoint(folder).load_dense()


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    folder = save(FAMILIES["llama"](), tmp_path)
    with pytest.raises(StartupError, match=r"LlamaForCausalLM cannot be served expert-parallel: .*no experts"):
        open_checkpoint(folder)


def test_a_checkpoint_that_is_not_in_safetensors_is_refused(tmp_path: Path) -> None:
    folder = save(MODELS["mixtral"](), tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(StartupError, match="safetensors only"):
        open_checkpoint(folder).load_experts([0])
