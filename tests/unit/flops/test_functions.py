"""The column as DeepSpeed counts: numbers that it printed, and its rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpispeed.flops.by_module import Counts, ModuleCounter
from mpispeed.flops.functions import deepspeed_count


class LeNet5(nn.Module):
    """LeNet-5 for 32 x 32 pixels, as in the profiler's own test."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(16, 120, 5), nn.Tanh(),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.classifier(torch.flatten(self.features(x), 1))
        return logits, F.softmax(logits, dim=1)


class Calls(nn.Module):
    """A model that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def counted(model: nn.Module, *args: Any) -> Counts:
    counter = ModuleCounter(model)
    counter.start()
    out = model(*args)
    if isinstance(out, Tensor) and out.requires_grad:
        out.sum().backward()
    counter.stop()
    assert not counter.unknown
    return counter.total()


def numbers(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    found = counted(Calls(function), *args)
    return found.deepspeed_flops, found.deepspeed_macs


def test_lenet_has_the_numbers_of_the_documentation() -> None:
    model = LeNet5(10)
    found = counted(model, torch.randn(1024, 1, 32, 32))
    assert (found.deepspeed_flops, found.deepspeed_macs) == (866_076_672, 426_516_480)
    assert sum(param.numel() for param in model.parameters()) == 61_706


def test_one_layer_without_gradients_of_anything() -> None:
    found = counted(nn.Linear(10, 10), torch.randn(1, 10))
    assert (found.deepspeed_flops, found.deepspeed_macs, found.forward) == (200, 100, 200)


def x(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


ELEMENTS: list[tuple[Callable[..., Any], tuple[Tensor, ...], int]] = [
    (F.relu, (x(2, 3),), 6),
    (F.gelu, (x(2, 3),), 6),
    (lambda a: F.softmax(a, -1), (x(2, 3),), 6),
    (nn.PReLU(), (x(2, 3),), 6),
    (F.relu6, (x(2, 3),), 6),
    (nn.ELU(), (x(2, 3),), 6),
    (nn.LeakyReLU(), (x(2, 3),), 6),
    (nn.SiLU(), (x(2, 3),), 6),
    (torch.tanh, (x(2, 3),), 0),
    (nn.Dropout(), (x(2, 3),), 0),
    (nn.Embedding(5, 4), (torch.tensor([1, 2]),), 0),
    (nn.LayerNorm(3), (x(2, 3),), 30),
    (nn.LayerNorm(3, elementwise_affine=False), (x(2, 3),), 24),
    (nn.GroupNorm(2, 4), (x(2, 4),), 40),
    (nn.InstanceNorm1d(4), (x(2, 4, 3),), 96),
    (nn.BatchNorm1d(3), (x(2, 3),), 30),
    (nn.BatchNorm1d(3).eval(), (x(2, 3),), 12),
    (nn.BatchNorm1d(3, affine=False).eval(), (x(2, 3),), 6),
    (nn.MaxPool2d(2), (x(1, 2, 4, 4),), 32),
    (nn.MaxPool1d(2, return_indices=True), (x(1, 2, 4),), 8),
    (nn.AvgPool1d(2), (x(1, 2, 4),), 8),
    (nn.AdaptiveAvgPool2d(1), (x(1, 2, 4, 4),), 32),
    (nn.AdaptiveMaxPool3d(1), (x(1, 2, 2, 2, 2),), 16),
    (nn.Upsample(size=(6, 5)), (x(1, 2, 3, 3),), 30),
    (nn.Upsample(scale_factor=2.0), (x(1, 2, 3, 3),), 72),
    (torch.add, (x(2, 3), x(2, 3)), 6),
    (torch.mul, (x(2, 3), x(2, 1)), 6),
    (lambda a, b: a.add(b), (x(2, 3), x(2, 3)), 6),
    (lambda a: a.mul(2.0), (x(2, 3),), 6),
    (lambda a, b: a + b, (x(2, 3), x(2, 3)), 0),
    (lambda a, b: a * b, (x(2, 3), x(2, 3)), 0),
    (lambda a: 2.0 * a + 1.0, (x(2, 3),), 0),
]


@pytest.mark.parametrize("number", range(len(ELEMENTS)))
def test_element_wise_functions(number: int) -> None:
    function, args, expected = ELEMENTS[number]
    assert numbers(function, *args) == (expected, 0)


def both(macs: int, more: int = 0) -> tuple[int, int]:
    return 2 * macs + more, macs


PRODUCTS: list[tuple[Callable[..., Any], tuple[Tensor, ...], tuple[int, int]]] = [
    (F.linear, (x(2, 3, 5), x(7, 5), x(7)), both(2 * 3 * 5 * 7)),
    (torch.matmul, (x(2, 3), x(3, 4)), both(24)),
    (lambda a, b: torch.mm(a, mat2=b), (x(2, 3), x(3, 4)), both(24)),
    (lambda a, b: a @ b, (x(2, 3), x(3, 4)), both(24)),
    (lambda a, b: a.bmm(b), (x(2, 2, 3), x(2, 3, 4)), both(48)),
    (torch.addmm, (x(4), x(2, 3), x(3, 4)), both(24, 4)),
    (torch.baddbmm, (x(2, 2, 4), x(2, 2, 3), x(2, 3, 4)), both(48, 16)),
    (lambda a, b: torch.einsum("ij, jk -> ik", a, b), (x(2, 3), x(3, 4)), (49, 0)),  # as numpy adds up
    (F.scaled_dot_product_attention, (x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 6)), both(24 * 5 + 6 * 5 * 6)),
    (nn.Conv1d(2, 4, 3, padding=1), (x(2, 2, 5),), both(3 * 2 * 4 * 10, 40)),
    (nn.Conv2d(2, 4, 3, stride=2, padding="valid", bias=False), (x(1, 2, 7, 7),), both(9 * 2 * 4 * 9)),
    (nn.Conv2d(2, 4, 3, padding="same", groups=2), (x(1, 2, 5, 5),), both(9 * 2 * 2 * 25, 100)),
    (nn.Conv2d(2, 4, 3, bias=False), (x(2, 5, 5),), both(9 * 2 * 4 * 9)),
    (nn.Conv3d(1, 2, 2, dilation=2, bias=False), (x(1, 1, 4, 4, 4),), both(8 * 2 * 8)),
    (nn.ConvTranspose1d(2, 4, 3), (x(1, 2, 5),), both(3 * 2 * 4 * 5, 4 * 3)),
]


@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_products(number: int) -> None:
    function, args, expected = PRODUCTS[number]
    assert numbers(function, *args) == expected


@pytest.mark.parametrize(("kind", "gates", "per_unit"), [("RNN", 1, 1), ("GRU", 3, 7), ("LSTM", 4, 10)])
def test_recurrent_layers(kind: str, gates: int, per_unit: int) -> None:
    rows = gates * 5

    def layer(inputs: int, has_bias: bool = True) -> int:
        return 2 * rows * inputs - rows + 2 * rows * 5 - rows + (2 * rows if has_bias else 0) + 5 * per_unit

    make = getattr(nn, kind)
    assert numbers(make(4, 5, num_layers=2, batch_first=True), x(2, 3, 4)) == (6 * (layer(4) + layer(5)), 0)
    assert numbers(make(4, 5, bias=False, bidirectional=True), x(3, 2, 4)) == (6 * 2 * layer(4, has_bias=False), 0)
    assert numbers(getattr(nn, f"{kind}Cell")(4, 5), x(2, 4)) == (2 * layer(4), 0)
    packed = nn.utils.rnn.pack_sequence([x(3, 4), x(2, 4)])
    assert numbers(lambda data: make(4, 5)(data)[0].data, packed) == (5 * layer(4), 0)


def test_multi_head_attention_is_made_of_its_products() -> None:
    layer, tokens = nn.MultiheadAttention(8, 2, batch_first=True), x(3, 4, 8)
    found = counted(layer, tokens, tokens, tokens)
    projections, attention = 12 * 8 * 8 * 4, 2 * 3 * 4 * 4 * 8
    assert found.deepspeed_macs == projections + attention
    assert found.deepspeed_flops == 2 * found.deepspeed_macs + 3 * 2 * 4 * 4  # the softmax
    assert found.forward == 2 * found.deepspeed_macs


def test_calls_can_be_counted_one_by_one() -> None:
    assert deepspeed_count(F.linear, (x(2, 3), x(4, 3)), {"bias": None}, None) == (48, 24)
    assert deepspeed_count(torch.tanh, (x(2, 3),), {}, None) is None


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped products")
def test_grouped_products_are_the_linear_layers_of_experts() -> None:
    rows, weights = x(16, 8).bfloat16(), x(2, 8, 16).bfloat16()
    ends = torch.tensor([8, 16], dtype=torch.int32)
    assert numbers(lambda a, b: F.grouped_mm(a, b, offs=ends), rows, weights) == both(16 * 8 * 16)
