"""Faster linear layers give what the plain ones give, whatever the shape of the rows, and share weights as before."""

import pytest
import torch
from torch import nn

from engine.model.placement import computes_natively
from engine.runner.linears import PackedLinear, WidenedLinear, optimize_linears

CPU = torch.device("cpu")
SHAPES = [(1, 1, 48), (1, 3, 48), (1, 4, 48), (1, 50, 48), (1, 0, 48), (7, 48)]


class Tied(nn.Module):
    """An embedding that is the output layer too, a large layer, a small one, and one of a class of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, 64, dtype=dtype)
        self.inner = nn.ModuleList([nn.Linear(64, 4096, dtype=dtype), nn.Linear(4096, 64, bias=False, dtype=dtype)])
        self.small = nn.Linear(64, 64, dtype=dtype)
        self.own = Doubling(64, 64, dtype=dtype)
        self.head = nn.Linear(64, 4096, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.requires_grad_(requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(token_ids)
        for layer in (*self.inner, self.small, self.own, self.head):
            hidden = layer(hidden) / 8
        return hidden


class Doubling(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * 2


def plain_layer(dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(48, 33, bias=bias, dtype=dtype).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_rows_equal_plain_rows(shape: tuple[int, ...], bias: bool) -> None:
    layer = plain_layer(torch.float32, bias=bias)
    rows = torch.randn(shape)
    torch.testing.assert_close(PackedLinear(layer)(rows), layer(rows))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_rows_are_the_exact_product_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = plain_layer(dtype, bias=True)
    rows = torch.randn(shape).to(dtype)
    # Room for 10 of the 33 features: the last piece is smaller than the others.
    product = WidenedLinear(layer, torch.empty(480))(rows)
    assert product.dtype == dtype
    expected = nn.functional.linear(rows.double(), layer.weight.double(), layer.bias.double())
    torch.testing.assert_close(product.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimized_model_answers_as_before(dtype: torch.dtype) -> None:
    model = Tied(dtype)
    token_ids = torch.arange(6)[None]
    expected = model(token_ids)
    optimize_linears(model, CPU)
    torch.testing.assert_close(model(token_ids), expected, rtol=0.03 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def test_an_output_layer_is_packed_apart_from_the_embedding_it_is_tied_to() -> None:
    model = Tied(torch.float32)
    optimize_linears(model, CPU)
    assert isinstance(model.head, PackedLinear)
    assert model.embed.weight.device == CPU
    assert [name for name, _ in model.named_parameters()] == [
        "embed.weight",
        "inner.0.bias",
        "small.weight",
        "small.bias",
        "own.weight",
        "own.bias",
    ], "the plain weights of packed layers are let go"


def test_small_layers_and_classes_of_their_own_stay() -> None:
    model = Tied(torch.float32)
    small, own = model.small, model.own
    optimize_linears(model, CPU)
    assert (model.small, model.own) == (small, own)


@pytest.mark.skipif(computes_natively(CPU, torch.bfloat16), reason="this processor has bfloat16 instructions")
def test_a_format_without_instructions_is_widened_and_keeps_its_weights() -> None:
    model = Tied(torch.bfloat16)
    optimize_linears(model, CPU)
    assert isinstance(model.head, WidenedLinear)
    assert isinstance(model.small, WidenedLinear)
    assert model.head.weight is model.embed.weight


def test_other_devices_keep_the_layers_of_the_library() -> None:
    model = Tied(torch.float32)
    optimize_linears(model, torch.device("meta"))
    assert type(model.head) is nn.Linear
