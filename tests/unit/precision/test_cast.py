"""Casting of batches and modules."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from mpispeed.precision import cast_inputs, cast_module
from mpispeed.precision.cast import naming_dtype

Batch = namedtuple("Batch", ["tokens", "weights"])


def test_inputs_are_cast_at_any_depth_and_other_leaves_stay() -> None:
    tokens, mask = torch.arange(3), torch.tensor([True, False])
    wave = torch.zeros(2, dtype=torch.complex64)
    tree = [
        (torch.ones(2), tokens),
        {"x": torch.ones(1, dtype=torch.float64), "mask": mask, "deep": [{"y": torch.ones(1)}]},
        Batch(tokens, torch.ones(2)),
        wave,
        "text",
        None,
        3.5,
    ]
    result = cast_inputs(tree, torch.float16)
    assert isinstance(result[0], tuple)
    assert result[0][0].dtype == torch.float16
    assert result[0][1] is tokens
    assert result[1]["x"].dtype == torch.float16
    assert result[1]["mask"] is mask
    assert result[1]["deep"][0]["y"].dtype == torch.float16
    assert isinstance(result[2], Batch)
    assert result[2].weights.dtype == torch.float16
    assert result[2].tokens is tokens
    assert result[3] is wave
    assert result[4:] == ["text", None, 3.5]
    assert tree[0][0].dtype == torch.float32


def test_dict_kind_and_order_are_kept() -> None:
    tree = OrderedDict(b=torch.ones(1), a=1)
    result = cast_inputs(tree, torch.bfloat16)
    assert type(result) is OrderedDict
    assert list(result) == ["b", "a"]
    assert tree["b"].dtype == torch.float32


def test_inputs_of_the_wanted_dtype_are_not_copied() -> None:
    x = torch.ones(2, dtype=torch.float16)
    assert cast_inputs((x,), torch.float16)[0] is x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.register_buffer("count", torch.arange(2))
        self.register_buffer("mask", torch.tensor([True]))
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
        self.register_buffer("mean", torch.full((2,), 0.5))
        self.register_buffer("mean_again", self.mean)
        self.outer.bias.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_module_is_cast_in_place(dtype: torch.dtype) -> None:
    module = Tied()
    before = dict(module.named_parameters())
    before["inner.bias"].grad = torch.ones(3)
    assert cast_module(module, dtype) is module
    assert module.outer.weight is module.inner.weight
    assert module.mean_again is module.mean
    for name, parameter in module.named_parameters():
        assert parameter is before[name]
        assert parameter.dtype == dtype
    assert module.inner.bias.grad.dtype == dtype
    assert not module.outer.bias.requires_grad
    assert module.mean.dtype == dtype
    kept = (module.count.dtype, module.mask.dtype, module.phase.dtype)
    assert kept == (torch.int64, torch.bool, torch.complex64)
    loss = module.outer(module.inner(torch.ones(1, 3, dtype=dtype))).sum()
    loss.backward()
    assert module.inner.weight.grad.dtype == dtype


MODULES = [
    nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3), nn.Linear(8, 4), nn.LayerNorm(8), nn.BatchNorm2d(3), nn.PReLU(),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_errors_about_mixed_dtypes_name_setting_and_cure(module: nn.Module, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError) as caught, naming_dtype(dtype, "bf16"):
        module.to(dtype)(torch.ones(1, 3, 8, 8))
    first, added = str(caught.value).split("\n")
    assert "Float" in first or "float" in first  # torch's own words stay
    assert added.startswith(f"bf16.enabled makes the model compute in {str(dtype).removeprefix('torch.')}: ")
    assert f"x.to({dtype})" in added
    assert ("auto_cast" in added) == (dtype == torch.float16)


def test_a_recurrent_layer_says_so_too() -> None:
    with pytest.raises(ValueError, match=r"\nfp16\.enabled makes"), naming_dtype(torch.float16, "fp16"):
        nn.LSTM(8, 4).half()(torch.ones(2, 3, 8))


def test_a_loss_of_outputs_and_targets_of_two_dtypes() -> None:
    outputs, targets = torch.full((2, 4), 0.5, dtype=torch.bfloat16, requires_grad=True), torch.ones(2, 4)
    wanted = r"(?s)Found dtype .*\nbf16\.enabled makes.* outputs\.float\(\)"
    with pytest.raises(RuntimeError, match=wanted), naming_dtype(torch.bfloat16, "bf16"):
        nn.functional.binary_cross_entropy(outputs, targets).backward()


def test_other_errors_stay_as_they_are() -> None:
    def shapes() -> None:
        nn.Linear(8, 4)(torch.ones(1, 3))

    def indices() -> None:
        nn.Embedding(4, 8)(torch.ones(3))

    for wrong in (shapes, indices):
        with pytest.raises(RuntimeError) as caught, naming_dtype(torch.float16, "fp16"):
            wrong()
        assert "enabled" not in str(caught.value)
    with pytest.raises(RuntimeError) as caught, naming_dtype(torch.float32, ""):
        nn.Linear(8, 4).half()(torch.ones(1, 8))
    assert "enabled" not in str(caught.value)
