"""A mixture-of-experts checkpoint that is read in parts: the dense weights, or some experts of every layer.

A rank of an expert-parallel group never holds, and never reads, experts it does not own. The library's own loader
builds the whole model and fills what is missing with random numbers, so its conversion step is driven directly here.
That step is no stable interface of transformers: nothing else in Shoal touches it.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from engine.wire.errors import StartupError

ExpertTensors = Mapping[str, Mapping[str, torch.Tensor]]
"""Name of an experts module -> name of its parameter -> the rows of the chosen experts, [num_experts, ...]."""

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ONE_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class ExpertCheckpoint:
    """A checkpoint in safetensors, local or from the hub. Tensors are read when they are needed.

    num_experts: experts of each layer; every layer with experts has the same number. expert_bytes: memory of one
    expert in all layers.
    """

    def __init__(self, path: str, dtype: torch.dtype | None, attention: str, experts: str) -> None:
        """Look at configuration and file names.

        dtype: None takes the checkpoint's own. attention, experts: names of functions registered with transformers.

        Raises:
            StartupError: the model has no experts, or not of a kind that can be shared out.
        """
        self._path = path
        self._config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
        self._dtype = dtype or self._config.dtype or torch.float32
        # Made once and copied: making it patches torch for the whole process, which no other thread may see.
        self._empty = _make_empty(self._config, self._dtype, attention, experts)
        self.num_experts = _num_experts(self._empty, self._config)
        self.expert_bytes = _num_expert_bytes(self._empty) // self.num_experts

    def load_dense(self) -> Any:
        """Return the model with all its weights but those of the experts, which have no rows yet."""
        model = copy.deepcopy(self._empty)
        expert_names = set(_resize_experts(model, self.num_experts, 0))
        self._fill(model, ())
        missing = {name for name, tensor in model.state_dict().items() if tensor.is_meta} - expert_names
        for (
            name
        ) in expert_names:  # without rows, but no longer without memory: rows are installed by exchanging ``data``
            owner, _, parameter = name.rpartition(".")
            meta = model.get_parameter(name)
            setattr(model.get_submodule(owner), parameter, nn.Parameter(torch.empty_like(meta, device="cpu")))
        model.tie_weights()
        # Tied weights lie in the checkpoint once, so what was missing before may be there now.
        missing = {name for name in missing if model.state_dict()[name].is_meta}
        if missing:
            raise StartupError(f"{self._path} lacks the weights {', '.join(sorted(missing)[:5])}")
        model.generation_config = self._generation_config()
        return model.eval()

    def load_experts(self, expert_ids: Sequence[int]) -> ExpertTensors:
        """Return the weights of some experts, in ascending order of their ids, in every layer.

        Raises:
            StartupError: the checkpoint lacks some of them.
        """
        owned = sorted(expert_ids)
        model = copy.deepcopy(self._empty)
        names = _resize_experts(model, self.num_experts, len(owned))
        if owned:
            self._check_present(owned)
            self._fill(model, owned)
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name in names:
            owner, _, parameter = name.rpartition(".")
            tensor = model.get_parameter(name).detach()
            if owned and (tensor.is_meta or len(tensor) != len(owned)):
                raise StartupError(f"{self._path} lacks some of the experts {owned} in {name}")
            tensors.setdefault(owner, {})[parameter] = tensor if owned else torch.empty_like(tensor, device="cpu")
        return tensors

    def _check_present(self, owned: Sequence[int]) -> None:
        """Raise for an expert that is missing where each has tensors of its own."""
        # The conversion step would only miscount, and not name it.
        held: dict[tuple[str, str], set[int]] = {}
        with ExitStack() as stack:
            for name, _ in self._open(stack):
                one = _ONE_EXPERT.search(name)
                if one is not None:
                    held.setdefault((name[: one.start()], name[one.end() :]), set()).add(int(one.group(1)))
        for (layer, parameter), experts in held.items():
            if missing := set(owned) - experts:
                raise StartupError(f"{self._path} lacks expert {min(missing)} of {layer}: its {parameter}")

    def _fill(self, model: Any, owned: Sequence[int]) -> None:
        """Read weights into a model: those of the owned experts, or without any the dense ones."""
        fused = _fused_names(model)
        with ExitStack() as stack:
            tensors = {
                name: chosen
                for name, tensor in self._open(stack)
                if (chosen := _select(name, tensor, fused, owned)) is not None
            }
            mapping: Any = get_model_conversion_mapping(model)
            config = LoadStateDictConfig(weight_mapping=mapping, dtype=self._dtype, device_map={"": "cpu"})
            info, _ = convert_and_load_state_dict_in_model(model, tensors, config)
        if info.conversion_errors:
            raise StartupError(f"{self._path}: {'; '.join(map(str, info.conversion_errors.values()))}")

    def _open(self, stack: ExitStack) -> Iterator[tuple[str, Any]]:
        """Yield every tensor of the checkpoint by name, unread."""
        for file in self._files():
            opened = stack.enter_context(safe_open(file, framework="pt"))
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_slice(name)

    def _files(self) -> list[str]:
        index = cached_file(self._path, _INDEX_FILE, _raise_exceptions_for_missing_entries=False)
        if index is not None:
            files, _ = get_checkpoint_shard_files(self._path, index)  # type: ignore[no-untyped-call]
            return list(files)
        single = cached_file(self._path, _SINGLE_FILE, _raise_exceptions_for_missing_entries=False)
        if single is None:
            raise StartupError(f"{self._path} holds no {_SINGLE_FILE}: experts are shared out from safetensors only")
        return [single]

    def _generation_config(self) -> Any:
        try:
            return GenerationConfig.from_pretrained(self._path)
        except OSError:
            return GenerationConfig.from_model_config(self._config)


def _make_empty(config: Any, dtype: torch.dtype, attention: str, experts: str) -> Any:
    """Return the model without memory for its weights; what is computed from the configuration is real."""
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation=experts,
            trust_remote_code=False,
        )
    return model.requires_grad_(requires_grad=False)


def find_experts(model: Any) -> dict[str, Any]:
    """Return the modules that hold a layer's experts as stacked tensors, by name, in the order of the layers."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    }


def _num_experts(model: Any, config: Any) -> int:
    modules = find_experts(model).values()
    counts = {module.num_experts for module in modules}
    name = (config.architectures or [type(config).__name__])[0]
    if any(module.has_post_expert_norm for module in modules):
        raise StartupError(f"{name} cannot be served expert-parallel: its experts end with a norm of their own")
    if len(counts) != 1:
        raise StartupError(f"{name} cannot be served expert-parallel: its layers hold {sorted(counts) or 'no'} experts")
    return int(counts.pop())


def _num_expert_bytes(model: Any) -> int:
    modules = find_experts(model).values()
    return sum(parameter.nbytes for module in modules for parameter in module.parameters(recurse=False))


def _resize_experts(model: Any, num_experts: int, num_rows: int) -> list[str]:
    """Give every stacked parameter so many rows, without memory; return the names of these parameters."""
    names = []
    for owner, module in find_experts(model).items():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.shape[0] == num_experts:
                empty = torch.empty(num_rows, *parameter.shape[1:], dtype=parameter.dtype, device="meta")
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
                names.append(f"{owner}.{name}")
    return names


def _fused_names(model: Any) -> set[str]:
    return {f"{owner}.{name}" for owner, module in find_experts(model).items() for name in module._parameters}


def _select(name: str, tensor: Any, fused: Set[str], owned: Sequence[int]) -> Any | None:
    """Return what of one checkpoint tensor is needed: dense ones when no expert is, else the owned experts' part.

    fused: names of the tensors that hold all experts of a layer.
    """
    one = _ONE_EXPERT.search(name)
    if one is None and name not in fused:
        return None if owned else tensor
    if not owned:
        return None
    if one is not None:
        return tensor if int(one.group(1)) in owned else None
    return torch.stack([tensor[expert] for expert in owned])
