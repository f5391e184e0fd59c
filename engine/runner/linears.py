"""Faster linear layers for CPUs: the same weights, laid out or read in a way the processor multiplies well.

Nothing else of the model is touched, and the results are those of ``torch.nn.Linear`` up to the order of summation. On
other devices the library's own layers are the fast ones.
"""

import logging
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from engine.model.placement import computes_natively

_LOGGER = logging.getLogger(__name__)

_BATCH_HINT = 32
"""Rows that the packed layout is chosen for; any number works."""

_MIN_PACKED_WEIGHTS = 1 << 18
"""Weights of a layer from which packing pays: each call of the packed product costs some 40 us more."""

_SCRATCH_ELEMENTS = 1 << 20
"""Weights widened to float32 at a time: 4 MB stay in the processor's cache between being written and being used."""

_MIN_WIDENED_ROWS = 4
"""With fewer rows the product waits for memory, and reading two bytes a weight beats computing well."""


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked layout: 1.3 to 3 times as fast as the plain one.

    The plain weight is freed, unless something else holds it, as an embedding does that is tied to the output layer.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight = plain.weight.to("meta")  # some models ask their layers for its type and shape
        self.bias = plain.bias
        self._packed = _pack(plain.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] for ``rows`` [..., in_features]."""
        if rows.numel() == 0:  # a step that samples nothing; the library does not take it
            return rows.new_empty(*rows.shape[:-1], len(self.weight))
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return product


class WidenedLinear(nn.Module):
    """A linear layer in a format that the processor has no instructions for, multiplied in float32 piece by piece.

    That is 3 to 6 times as fast as the plain layer and needs no second copy of the weights. The result is rounded once,
    as the processor's own instructions would round it.
    """

    def __init__(self, plain: nn.Linear, scratch: torch.Tensor) -> None:
        """Share the plain layer's weight. scratch: float32 memory that all layers of a model may use in turn."""
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self._wide_bias = None if plain.bias is None else plain.bias.float()
        self._scratch = scratch
        self._rows_per_piece = len(scratch) // plain.in_features

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] for ``rows`` [..., in_features]."""
        if rows.numel() < _MIN_WIDENED_ROWS * rows.shape[-1]:
            return linear(rows, self.weight, self.bias)
        wide = rows.float()
        product = rows.new_empty(*rows.shape[:-1], len(self.weight))
        for first in range(0, len(self.weight), self._rows_per_piece):
            piece = slice(first, first + self._rows_per_piece)
            narrow = self.weight[piece]
            weight = self._scratch[: narrow.numel()].view_as(narrow).copy_(narrow)
            bias = None if self._wide_bias is None else self._wide_bias[piece]
            product[..., piece] = linear(wide, weight, bias)
        return product


def optimize_linears(model: Any, device: torch.device) -> None:
    """Replace the plain linear layers of a model on a CPU by faster ones, where there are any."""
    if device.type != "cpu":
        return
    # Not instances of subclasses: their forward pass differs.
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    natively = {layer.weight.dtype: computes_natively(device, layer.weight.dtype) for layer in layers.values()}
    packs = {dtype: _can_pack(dtype) for dtype, is_native in natively.items() if is_native}
    widest = max((layer.in_features for layer in layers.values()), default=0)
    # One piece of memory for all layers, which run one after another.
    scratch = torch.empty(0 if all(natively.values()) else max(widest, _SCRATCH_ELEMENTS))
    for name, layer in layers.items():
        if not natively[layer.weight.dtype]:
            model.set_submodule(name, WidenedLinear(layer, scratch))
        elif packs[layer.weight.dtype] and layer.weight.numel() >= _MIN_PACKED_WEIGHTS:
            model.set_submodule(name, PackedLinear(layer))


def _can_pack(dtype: torch.dtype) -> bool:
    """Tell whether this build of PyTorch packs weights of a format on this processor."""
    try:
        _pack(torch.zeros(2, 2, dtype=dtype))
    except (AttributeError, RuntimeError) as error:  # not built in, another version's signature, or no instructions
        _LOGGER.debug("weights stay unpacked in %s: %s", dtype, error)
        return False
    return True


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _BATCH_HINT)
    return packed
